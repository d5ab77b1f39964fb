"""How a benchmark runs: SIGTERM ends it as Ctrl-C does, so that the servers which it started end with it."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(measuring: Coroutine[Any, Any, T]) -> T:
    """Its result."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return asyncio.run(measuring)
