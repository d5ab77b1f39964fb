"""Work side by side that may grow while it runs, and ends together: its first error is everybody's."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

from temporalio import workflow


def raise_if_cancelled() -> None:
    """Raise a cancellation that was swallowed. What is waited for may end in the same moment: then waits with a timeout
    (`asyncio.wait_for` of Python 3.11) and those of the SDK for activities, children and signals return as if nothing
    else had happened. Called before and after waits for what a cancelled workflow would never get."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Tasks:
    """The tasks of one workflow, in the order in which they were started."""

    def __init__(self) -> None:
        self._running: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None

    @property
    def are_done(self) -> bool:
        """Whether nothing runs."""
        return not self._running

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin one more piece of work."""
        task = asyncio.create_task(work)
        self._running.append(task)
        task.add_done_callback(self._ended)

    async def until(self, condition: Callable[[], bool], within: timedelta | None = None) -> None:
        """Wait for something. Raises the first error of any work instead, or TimeoutError."""
        raise_if_cancelled()
        await workflow.wait_condition(lambda: self._error is not None or condition(), timeout=within)
        raise_if_cancelled()
        if self._error is not None:
            raise self._error

    async def end(self) -> None:
        """Cancel what runs and wait for its end."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.remove(task)
        error = None if task.cancelled() else task.exception()
        self._error = self._error or error
