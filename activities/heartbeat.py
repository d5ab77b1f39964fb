"""Heartbeats of an activity, sent by a background task that is not the thing being waited for.

A heartbeat says that the worker lives, and what it does (the Temporal UI shows it); deadlines on the work itself are
the work's own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity

_BEATS_PER_TIMEOUT = 4
_DEFAULT_INTERVAL_S = 10.0


class Heartbeats:
    """The beating of one activity."""

    def __init__(self) -> None:
        self._details: tuple[str, ...] = ()

    def say(self, text: str) -> None:
        """Beat at once, and from now on with this text."""
        self._details = (text,)
        self.beat()

    def beat(self) -> None:
        """One heartbeat."""
        activity.heartbeat(*self._details)


@asynccontextmanager
async def heartbeats(interval_s: float | None = None) -> AsyncIterator[Heartbeats]:
    """Heartbeat until the block ends; by default four times in the activity's heartbeat timeout."""
    beats = Heartbeats()
    if interval_s is None:
        timeout = activity.info().heartbeat_timeout
        interval_s = timeout.total_seconds() / _BEATS_PER_TIMEOUT if timeout else _DEFAULT_INTERVAL_S

    async def beat() -> None:
        while True:
            beats.beat()
            await asyncio.sleep(interval_s)

    beating = asyncio.create_task(beat())
    try:
        yield beats
    finally:
        beating.cancel()
        await asyncio.wait([beating])  # unlike `await beating`, keeps apart its cancellation and the activity's
