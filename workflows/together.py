"""Work side by side that ends together: when one part fails or the workflow is cancelled, no part is left running."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def all_or_none(parts: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """The results in order. The first error is raised once the other parts are cancelled and have ended."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    except (Exception, asyncio.CancelledError):
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
