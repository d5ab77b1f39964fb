"""One start of one service: a process in a session and process group of its own, output in its log file.

After `stop` nothing of the group is left, however deaf it was.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from workers.stack.errors import ServiceFailed
from workers.stack.logs import open_log, tail
from workers.stack.processes import ProcessId, kill_group
from workers.stack.service import Service

FIRST_PROBE_PAUSE_S = 0.05  # PostgreSQL takes a tenth of a second; doubled, because vLLM takes half a minute
PROBE_PAUSE_S = 0.5
PROBE_TIMEOUT_S = 10.0
TAIL_LINES = 15


class ChildExited(RuntimeError):
    """The process ended before the service was ready."""


class NotReady(RuntimeError):
    """The service was not ready before its deadline."""


class Child:
    """A running process of a service."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process, identity: ProcessId) -> None:
        self.service = service
        self.identity = identity
        self._process = process

    @classmethod
    async def start(cls, service: Service, log: Path) -> "Child":
        """Start the process; OSError when the program cannot be executed."""
        launch = await service.launch()
        with open_log(log, f"start {service.name}: {' '.join(launch.argv)}") as output:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **launch.env},
                cwd="/" if launch.user else None,
                user=launch.user,
                start_new_session=True,
            )
        identity = ProcessId.of(process.pid)
        return cls(service, process, identity)

    async def wait(self) -> int:
        """The exit code (negative: the signal), once the process has ended; its group is gone then, too."""
        code = await self._process.wait()
        kill_group(self._process.pid)
        return code

    async def wait_ready(self) -> None:
        """Ask until the service is ready; ChildExited or NotReady when that cannot be, or takes too long."""
        exited = asyncio.create_task(self._process.wait())
        probing = asyncio.create_task(_probe_until_ready(self.service))
        try:
            await asyncio.wait({exited, probing}, return_when=asyncio.FIRST_COMPLETED)
            if not probing.done():
                raise ChildExited(describe_exit(exited.result()))
            probing.result()
        finally:
            for task in (exited, probing):
                task.cancel()
            await asyncio.gather(exited, probing, return_exceptions=True)

    async def stop(self) -> None:
        """Signal, deadline, SIGKILL of the group."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(self.service.stop_signal)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.service.stop_timeout_s):
                await self._process.wait()
        kill_group(self._process.pid)
        await self._process.wait()


@asynccontextmanager
async def running(service: Service, log: Path) -> AsyncIterator[Child]:
    """A service that is ready inside the block and gone after it, without supervision."""
    child = await Child.start(service, log)
    try:
        try:
            await child.wait_ready()
        except (ChildExited, NotReady) as error:
            raise ServiceFailed(service.name, str(error), log, tail(log, TAIL_LINES)) from error
        yield child
    finally:
        await child.stop()


def describe_exit(code: int) -> str:
    """An exit code in words."""
    return f"it was ended by signal {-code}" if code < 0 else f"it exited with code {code}"


async def _probe_until_ready(service: Service) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.ready_timeout_s
    pause_s = FIRST_PROBE_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):  # wait_for of Python 3.11 can lose a cancellation
                return await service.ready()
        except Exception as error:  # any error of a probe means: not ready yet
            if loop.time() > deadline:
                raise NotReady(
                    f"it was not ready after {service.ready_timeout_s:g} s ({type(error).__name__}: {error})"
                ) from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PROBE_PAUSE_S)
