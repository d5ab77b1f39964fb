"""Which endpoints a refit may go on without. In quarantine nothing samples on an endpoint until it has come back.

`generation.on_failed_endpoint: wait` quarantines nobody. With `quarantine`, the first try of a refit waits for every
endpoint as well (a server that is being started again is soon back); each later try goes on without those that fail.
"""

import logging
from typing import Protocol

from storage.quarantines import Quarantines

PATIENT_TRIES = 1  # of a refit, which no endpoint may fail

_log = logging.getLogger(__name__)


class Quarantine(Protocol):
    """What a refit asks and tells. Endpoints are named by their URL, without a slash at the end."""

    @property
    def held(self) -> frozenset[str]:
        """Endpoints that are in quarantine and whose failure does not matter."""
        ...

    @property
    def tolerant(self) -> bool:
        """Whether others may be quarantined."""
        ...

    async def begin(self, url: str, reason: str) -> None:
        """Returns when it is written."""
        ...

    async def release(self, url: str) -> None:
        """The endpoint serves the weights and is resumed; it may not have been in quarantine."""
        ...


class NoQuarantine:
    """Every endpoint must take the weights."""

    held: frozenset[str] = frozenset()
    tolerant = False

    async def begin(self, url: str, reason: str) -> None:
        """Never called."""
        raise AssertionError(f"{url} cannot be quarantined: {reason}")

    async def release(self, url: str) -> None:
        """Nothing to release."""


NO_QUARANTINE = NoQuarantine()


class LedgerQuarantine:
    """The quarantines of the ledger, for one refit to `version` of a run."""

    def __init__(self, quarantines: Quarantines, run_id: str, version: int, *, tolerant: bool) -> None:
        self._quarantines = quarantines
        self._run_id = run_id
        self._version = version
        self._open: frozenset[str] = frozenset()
        self.tolerant = tolerant
        self.held: frozenset[str] = frozenset()

    async def read(self, *, hold: bool) -> None:
        """Read who is in quarantine. `hold`: their failure does not matter; else they are needed like all others."""
        self._open = frozenset(quarantine.endpoint for quarantine in await self._quarantines.open())
        self.held = self._open if hold else frozenset()

    async def begin(self, url: str, reason: str) -> None:
        """Write it."""
        await self._quarantines.begin(self._run_id, url, self._version, reason)
        _log.warning("run %s, policy-%d: vLLM at %s is quarantined: %s", self._run_id, self._version, url, reason)

    async def release(self, url: str) -> None:
        """Write that it is over."""
        if url in self._open and await self._quarantines.release(url):
            _log.warning("run %s: vLLM at %s serves policy-%d and is released", self._run_id, url, self._version)


def is_tolerant(attempt: int, max_attempts: int) -> bool:
    """Whether a try of a refit may quarantine: every one after the first, or the first where there is no other."""
    return attempt > min(PATIENT_TRIES, max_attempts - 1)
