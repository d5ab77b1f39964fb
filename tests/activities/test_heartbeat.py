"""Heartbeats go on while an activity waits, and end with it."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest
from temporalio.testing import ActivityEnvironment

from activities.heartbeat import heartbeats

PATIENCE_S = 60.0


class Beats:
    """Counts heartbeats; waits for the n-th."""

    def __init__(self) -> None:
        self.count = 0
        self._beaten = asyncio.Event()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.count < count:
                self._beaten.clear()
                await self._beaten.wait()

    def beat(self, *_: object) -> None:
        self.count += 1
        self._beaten.set()


async def beating(
    activity: Callable[[Beats], Awaitable[str]], heartbeat_timeout_s: float | None = 0.02, beats: Beats | None = None
) -> str:
    """Run an activity; nothing may be left of its heartbeats when it has ended."""
    beats = beats or Beats()
    environment = ActivityEnvironment()
    environment.on_heartbeat = beats.beat
    timeout = None if heartbeat_timeout_s is None else timedelta(seconds=heartbeat_timeout_s)
    environment.info = dataclasses.replace(environment.info, heartbeat_timeout=timeout)
    before = asyncio.all_tasks()
    try:
        return await environment.run(activity, beats)
    finally:
        assert not [task for task in asyncio.all_tasks() - before if "beat" in repr(task)]


async def test_what_an_activity_says_goes_out_at_once_and_with_every_later_beat() -> None:
    said: list[tuple[str, ...]] = []
    enough = asyncio.Event()

    def heard(*details: str) -> None:
        said.append(details)
        if said.count(("replays 3",)) == 2:
            enough.set()

    async def speaking() -> None:
        async with heartbeats(interval_s=0.01) as beats:
            beats.say("replays 3")
            async with asyncio.timeout(PATIENCE_S):
                await enough.wait()

    environment = ActivityEnvironment()
    environment.on_heartbeat = heard
    await environment.run(speaking)
    assert said[-1] == ("replays 3",)


async def test_blocked_activity_keeps_beating() -> None:
    async def blocked(beats: Beats) -> str:
        async with heartbeats():
            await beats.reach(5)
        return "done"

    assert await beating(blocked) == "done"


async def test_interval_may_be_given() -> None:
    async def blocked(beats: Beats) -> str:
        async with heartbeats(0.001):
            await beats.reach(3)
        return "done"

    assert await beating(blocked, heartbeat_timeout_s=None) == "done"


async def test_activity_without_a_heartbeat_timeout_beats_at_once() -> None:
    async def blocked(beats: Beats) -> str:
        async with heartbeats():
            await beats.reach(1)
        return "done"

    assert await beating(blocked, heartbeat_timeout_s=None) == "done"


async def test_error_of_the_activity_is_its_own() -> None:
    async def failing(beats: Beats) -> str:
        async with heartbeats():
            await beats.reach(1)
            raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        await beating(failing)


async def test_cancelled_activity_ends_as_cancelled() -> None:
    async def endless(beats: Beats) -> str:
        async with heartbeats():
            await asyncio.Event().wait()
        return "never"

    beats = Beats()
    running = asyncio.create_task(beating(endless, beats=beats))
    await beats.reach(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_heartbeat_that_fails_does_not_spoil_the_result() -> None:
    class Broken(Beats):
        def beat(self, *_: object) -> None:
            super().beat()
            raise RuntimeError("the worker is going away")

    async def working(beats: Beats) -> str:
        async with heartbeats():
            await beats.reach(1)
        return "done"

    assert await beating(working, beats=Broken()) == "done"
