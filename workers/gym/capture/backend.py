"""The ledger that NeMo-Gym's capture writes to and reads from: one per process, put here before the first request.

NeMo-Gym wants its sinks and resolvers before it builds a server, which is before there is a connection.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from nemo_gym.token_id_capture.records import TokenEntry

from storage.captures import CapturedEntry, Captures
from storage.model_calls import ModelCalls
from storage.records import AttemptCall, RecordedResponse
from workers.gym.capture.entries import stored, whole
from workers.gym.capture.recent import RecentResponses
from workers.gym.capture.served import serving


class CaptureBackend:
    """Captures, and the calls that have their tokens. Every use ends within `timeout_s`."""

    def __init__(self, captures: Captures, calls: ModelCalls, timeout_s: float) -> None:
        self.captures = captures
        self._calls = calls
        self._timeout_s = timeout_s
        self._recent = RecentResponses()

    def deadline(self) -> AbstractAsyncContextManager[object]:
        """For one use."""
        return asyncio.timeout(self._timeout_s)

    async def put(self, entry: TokenEntry) -> None:
        """Store an entry; with its tokens only if the response that is being served is not the ledger's."""
        served = serving()
        captured = stored(entry, served)
        await self.captures.put(entry.rollout_id, captured)
        if served is not None and captured.call is not None:
            self._recent.add(served)

    async def whole(self, entries: Iterable[CapturedEntry]) -> list[TokenEntry]:
        """Entries with their tokens."""
        attempts: dict[tuple[str, int], dict[int, AttemptCall]] = {}
        return [whole(entry, await self._call(entry, attempts)) for entry in entries]

    async def _call(
        self, entry: CapturedEntry, attempts: dict[tuple[str, int], dict[int, AttemptCall]]
    ) -> AttemptCall | RecordedResponse | None:
        if entry.call is None or entry.rollout_id is None:
            return None
        recent = self._recent.get(entry.rollout_id, entry.call.attempt, entry.call.ordinal)
        if recent is not None:
            return recent
        attempt = (entry.rollout_id, entry.call.attempt)
        if attempt not in attempts:
            attempts[attempt] = {call.ordinal: call for call in await self._calls.of_attempt(*attempt)}
        return attempts[attempt][entry.call.ordinal]


_INSTALLED: CaptureBackend | None = None


def install(backend: CaptureBackend | None) -> None:
    """What the sinks, resolvers and sources of this process use from now on."""
    global _INSTALLED
    _INSTALLED = backend


def installed() -> CaptureBackend:
    """The backend of this process."""
    if _INSTALLED is None:
        raise RuntimeError("no ledger was given to NeMo-Gym's token capture in this process")
    return _INSTALLED
