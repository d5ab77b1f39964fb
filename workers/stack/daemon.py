"""The supervisor process (`python -m workers.stack.daemon --state-dir DIR`): runs the stack of DIR's recipes.

One per state folder (a file lock says so). SIGTERM stops everything in reverse order. If something does not start, all
is stopped again and the reason is left in `state.json`.
"""

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from workers.stack.errors import StackError
from workers.stack.members import stack_members
from workers.stack.processes import MARK, ProcessId, adopt_orphans, kill_orphans
from workers.stack.recipes import StackRecipes
from workers.stack.state import Phase, StackState
from workers.stack.supervisor import Supervisor

logger = logging.getLogger(__name__)


class Daemon:
    """The supervisor and its state file."""

    def __init__(self, state_dir: Path, recipes: StackRecipes) -> None:
        self._path = state_dir / "state.json"
        self._identity = ProcessId.of(os.getpid())
        self._phase: Phase = "starting"
        self._reason: str | None = None
        self._supervisor = Supervisor(
            stack_members(recipes, state_dir), state_dir / "logs", on_change=self._save, on_death=self._clean_up
        )

    async def run(self) -> int:
        """Until SIGTERM or SIGINT, or until something does not start; the exit code."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        self._save()
        starting = asyncio.create_task(self._supervisor.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        failure = starting.exception() if starting.done() else None
        if failure is not None:
            self._reason = str(failure)
            logger.error("%s", failure)
        elif not stop.is_set():
            self._enter("up")
            await stopping
        starting.cancel()
        stopping.cancel()
        self._enter("stopping")
        await self._supervisor.stop()
        self._enter("failed" if failure else "down")
        return 1 if failure else 0

    def _enter(self, phase: Phase) -> None:
        logger.info("the stack is %s", phase)
        self._phase = phase
        self._save()

    def _save(self) -> None:
        StackState(
            phase=self._phase, supervisor=self._identity, reason=self._reason, services=self._supervisor.statuses
        ).save(self._path)

    def _clean_up(self) -> None:
        for pid in kill_orphans(self._supervisor.pids):
            logger.warning("process %d was left behind by a service that ended, and was killed", pid)


def main() -> int:
    """Entry point; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workers.stack.daemon")
    parser.add_argument("--state-dir", type=Path, required=True)
    state_dir: Path = parser.parse_args().state_dir.resolve()
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a probe is no event
    lock = os.open(state_dir / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.error("another supervisor already serves %s", state_dir)
        return 1
    recipes = StackRecipes.load(state_dir)
    if recipes is None:
        logger.error("%s has no readable recipes: start the stack with `onbelay up`", state_dir)
        return 1
    adopt_orphans()
    os.environ[MARK] = str(state_dir)
    try:
        return asyncio.run(Daemon(state_dir, recipes).run())
    except StackError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
