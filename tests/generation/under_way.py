"""For tests in which a real server has to be met while a call is under way: how soon it ends depends on the machine."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

T = TypeVar("T")

MOST_TRIES = 5


async def while_under_way(attempt: Callable[[], Awaitable[T | None]]) -> T:
    """What an attempt observed at a server that was paused while its call was under way.

    An attempt puts the old weights back, begins its call, pauses the server, and returns None if the call had ended
    by then: that attempt does not count.
    """
    for _ in range(MOST_TRIES):
        observed = await attempt()
        if observed is not None:
            return observed
    raise AssertionError(f"in {MOST_TRIES} tries the call had ended before the server was paused, or was not met by it")


async def works(url: str) -> bool:
    """Whether a server has requests that have begun; a paused one says so for as long as it is asked."""
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert running, "the server does not say how many requests run"
    return any(float(line.rsplit(" ", 1)[1]) > 0 for line in running)
