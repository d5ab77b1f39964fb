"""The ledger as the model server sees it: each write ends within its deadline, and none is lost with its request.

A write that has begun goes on when the agent hangs up. An error of the ledger becomes the answer that the agent gets:
404 for a fenced attempt (it ends agents at once; other statuses are retried), 400 for an unknown one, 500 where the
ledger did not answer in time. In each of these cases the response stays here.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import HTTPException, status

from storage.errors import AttemptFenced, BlobError, LedgerUnavailable, UnknownAttempt, UnknownRollout
from storage.model_calls import ModelCalls
from storage.records import CallLease, GeneratedResponse, ParentCall, RecordedResponse
from workers.gym.policy_model.caller import Caller

Written = TypeVar("Written")


class Recorder:
    """Claims, records, and gives back; one for all model servers of a process."""

    def __init__(self, calls: ModelCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self._writes: set[asyncio.Task[Any]] = set()

    async def claim(self, caller: Caller, fingerprint: str) -> CallLease:
        """The next occurrence of a request, with its response if that is recorded."""
        write = self._begin(self._calls.claim(caller.rollout_id, caller.attempt, fingerprint))
        try:
            return await self._end(write)
        except asyncio.CancelledError:
            self._begin(self._give_back(write))
            raise

    async def record(self, lease: CallLease, response: GeneratedResponse) -> RecordedResponse:
        """Returns when the response is durable, and only then."""
        return await self._end(self._begin(self._calls.record(lease, response)))

    async def fail(self, lease: CallLease, failure_class: str, cause: str) -> None:
        """Write why there is no response."""
        await self._end(self._begin(self._calls.fail(lease, failure_class, cause)))

    def release(self, lease: CallLease) -> None:
        """Nothing happened: the request was cancelled. Goes on in the background."""
        self._begin(self._released(lease))

    async def measure(self, caller: Caller, prompt_tokens: int) -> None:
        """The agent asked how long a prompt is."""
        await self._end(self._begin(self._calls.measure(caller.rollout_id, caller.attempt, prompt_tokens)))

    async def parents_by_tokens(self, rollout_id: str, attempt: int, cumulative_digest: str) -> list[ParentCall]:
        """Calls of the attempt that end with these tokens."""
        return await self._end(self._begin(self._calls.parents_by_tokens(rollout_id, attempt, cumulative_digest)))

    async def parents_by_conversation(self, rollout_id: str, attempt: int, key: str) -> list[ParentCall]:
        """Calls of the attempt that end this conversation."""
        return await self._end(self._begin(self._calls.parents_by_conversation(rollout_id, attempt, key)))

    async def close(self) -> None:
        """Wait for the writes that are under way; each has its deadline."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def _give_back(self, claim: asyncio.Task[CallLease]) -> None:
        with suppress(Exception):
            await self._released(await claim)

    async def _released(self, lease: CallLease) -> None:
        if lease.recorded is None:
            with suppress(Exception):  # an unreleased lease is a call that was abandoned: true as well
                await self._calls.release(lease)

    def _begin(self, work: Coroutine[Any, Any, Written]) -> asyncio.Task[Written]:
        write = asyncio.create_task(self._within_deadline(work))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _within_deadline(self, work: Coroutine[Any, Any, Written]) -> Written:
        async with asyncio.timeout(self._timeout_s):
            return await work

    async def _end(self, write: asyncio.Task[Written]) -> Written:
        try:
            return await asyncio.shield(write)
        except AttemptFenced as error:
            raise HTTPException(status.HTTP_404_NOT_FOUND, f"attempt_fenced: {error}") from error
        except (UnknownRollout, UnknownAttempt) as error:
            raise HTTPException(status.HTTP_400_BAD_REQUEST, f"rollout_unknown: {error}") from error
        except (LedgerUnavailable, BlobError) as error:
            raise HTTPException(status.HTTP_500_INTERNAL_SERVER_ERROR, f"ledger_unavailable: {error}") from error
        except TimeoutError as error:
            raise HTTPException(
                status.HTTP_500_INTERNAL_SERVER_ERROR,
                f"ledger_unavailable: the ledger took longer than storage.record_timeout_s ({self._timeout_s:g} s). "
                "The response is not released; the next attempt replays it if it was recorded after all.",
            ) from error
