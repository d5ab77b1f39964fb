"""Which endpoints of the policy may be asked: those that are not in quarantine, according to the ledger.

The ledger is read every `PERIOD_S`. An endpoint that is quarantined gets no new call, and the calls that it holds fail
(the next attempt replays what was recorded and asks another one). An endpoint that was released is asked again once it
is proven to serve the policy. While the ledger does not answer, what was last known stays true.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from storage.errors import StorageError

PERIOD_S = 2.0
TIMEOUT_S = 10.0  # of one reading

_log = logging.getLogger(__name__)


class QuarantinedEndpoint(Protocol):
    """A quarantine of the ledger, as far as this module knows it."""

    @property
    def endpoint(self) -> str: ...


class Fleet:
    """The quarantine as one process knows it. Endpoints are named by their URL, without a slash at the end."""

    def __init__(self, read: Callable[[], Awaitable[Sequence[QuarantinedEndpoint]]]) -> None:
        self._read = read
        self._away: dict[str, asyncio.Event] = {}

    def away(self, url: str) -> asyncio.Event:
        """Set while the endpoint is in quarantine."""
        return self._away.setdefault(url, asyncio.Event())

    def is_away(self, url: str) -> bool:
        """Whether the endpoint is in quarantine."""
        return self.away(url).is_set()

    async def refresh(self) -> None:
        """Read the ledger once. Raises StorageError or TimeoutError, and then changes nothing."""
        async with asyncio.timeout(TIMEOUT_S):
            quarantined = {found.endpoint for found in await self._read()}
        for url in quarantined | self._away.keys():
            away = self.away(url)
            if away.is_set() != (url in quarantined):
                _log.warning("vLLM at %s is %s", url, "quarantined" if url in quarantined else "released")
            if url in quarantined:
                away.set()
            else:
                away.clear()

    async def watch(self, after: Callable[[], Awaitable[None]]) -> None:
        """Refresh for ever, and call `after` each time, which looks at endpoints that came back."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.refresh()
                await after()
            except (StorageError, TimeoutError) as error:
                _log.warning("the quarantines cannot be read: %s", error or type(error).__name__)


def another(session: str, urls: Iterable[str]) -> str | None:
    """Where a session goes whose own endpoint is away: always to the same one of these, None if there is none.

    Not by the part of the hash that NeMo-Gym chooses by, which is much the same for all sessions of one endpoint.
    """
    left = sorted(urls)
    at = int.from_bytes(hashlib.sha256(session.encode()).digest()[8:16], "big")
    return left[at % len(left)] if left else None
