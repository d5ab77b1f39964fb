"""Tiny services for tests of the supervisor: Python programs that announce themselves by writing a file."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from workers.stack.service import Launch, Service

DEADLINE_S = 60  # a busy machine is no failure
SERVE = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def stop(*_):
    with open(sys.argv[2], 'a') as file: file.write(out.name + '\\n')
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('hello from', out.name, flush=True)
out.write_text('ready')
while True: time.sleep(0.05)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SERVE.replace(
    "signal.signal(signal.SIGTERM, stop)", ""
)
CRASH = "import sys; print('no luck', flush=True); sys.exit(3)"


def service(
    folder: Path,
    name: str,
    program: str = SERVE,
    after: tuple[str, ...] = (),
    ready_timeout_s: float = DEADLINE_S,
    stop_timeout_s: float = DEADLINE_S,
) -> Service:
    """A service that is ready when its file exists; `stopped` in the folder lists clean stops in order."""
    mark = folder / name

    async def launch() -> Launch:
        mark.unlink(missing_ok=True)
        return Launch((sys.executable, "-c", program, str(mark), str(folder / "stopped")))

    async def ready() -> None:
        if not mark.exists():
            raise FileNotFoundError(mark)

    return Service(name, launch, ready, ready_timeout_s, after, signal.SIGTERM, stop_timeout_s)


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; TimeoutError when it does not come."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.02)
