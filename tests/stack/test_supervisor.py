"""The supervisor with small real processes: order, restarts, giving up, stopping."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.stack.children import CRASH, DEADLINE_S, DEAF, SERVE, service, until
from workers.stack.errors import ServiceFailed
from workers.stack.restarts import RestartPolicy
from workers.stack.service import Action, Launch, Service
from workers.stack.state import ServiceStatus
from workers.stack.supervisor import Supervisor

QUICK = RestartPolicy(first_wait_s=0.02, longest_wait_s=0.05, attempts_at_start=3, failures_in_a_row=4)


@asynccontextmanager
async def supervised(
    folder: Path, members: Sequence[Service | Action], on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(members, folder / "logs", policy=QUICK, on_change=on_change)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


def status(supervisor: Supervisor, name: str) -> ServiceStatus:
    return next(status for status in supervisor.statuses if status.name == name)


def pid(supervisor: Supervisor, name: str) -> int:
    process = status(supervisor, name).process
    assert process is not None
    return process.pid


async def test_a_service_starts_when_what_it_needs_is_ready_and_stops_before_it(tmp_path: Path) -> None:
    ready: list[str] = []

    def note() -> None:
        for one in supervisor.statuses:
            if one.state in ("ready", "done") and one.name not in ready:
                ready.append(one.name)

    async def migrate() -> None:
        assert (tmp_path / "base").exists()

    members = [
        service(tmp_path, "top", after=("migration",)),
        Action("migration", migrate, timeout_s=DEADLINE_S, after=("base",)),
        service(tmp_path, "base"),
    ]
    async with supervised(tmp_path, members, note) as supervisor:
        await supervisor.start()
        assert ready == ["base", "migration", "top"]
    assert (tmp_path / "stopped").read_text().split() == ["top", "base"]


async def test_independent_services_start_side_by_side(tmp_path: Path) -> None:
    wait_for_other = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '-other'): time.sleep(0.02)\n"
    left = service(tmp_path, "left", program="import sys; open(sys.argv[1] + '-started', 'w').close()" + SERVE)
    right = service(tmp_path, "right", program=wait_for_other + SERVE)
    async with supervised(tmp_path, [right, left]) as supervisor:
        starting = asyncio.create_task(supervisor.start())
        await until((tmp_path / "left-started").exists)
        (tmp_path / "right-other").touch()
        await starting


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, [service(tmp_path, "one")]) as supervisor:
        await supervisor.start()
        first = pid(supervisor, "one")
        os.kill(first, signal.SIGKILL)
        await until(lambda: status(supervisor, "one").state == "ready" and pid(supervisor, "one") != first)
        assert status(supervisor, "one").restarts == 1
        assert status(supervisor, "one").reason == "it was ended by signal 9"


async def test_the_children_of_a_killed_service_go_with_it(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    parent += "open(sys.argv[1] + '-child', 'w').write(str(child.pid))\n" + SERVE
    async with supervised(tmp_path, [service(tmp_path, "one", program=parent)]) as supervisor:
        await supervisor.start()
        child = psutil.Process(int((tmp_path / "one-child").read_text()))
        os.kill(pid(supervisor, "one"), signal.SIGKILL)
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_a_service_that_cannot_start_fails_the_start_with_its_log(tmp_path: Path) -> None:
    async with supervised(tmp_path, [service(tmp_path, "good"), service(tmp_path, "bad", CRASH)]) as supervisor:
        with pytest.raises(ServiceFailed, match=r"(?s)bad does not start: it exited with code 3.*bad\.log.*no luck"):
            await supervisor.start()
        assert status(supervisor, "bad").state == "failed"
        assert (tmp_path / "logs" / "bad.log").read_text().count("--- ") == QUICK.attempts_at_start


async def test_a_missing_program_fails_the_start(tmp_path: Path) -> None:
    broken = service(tmp_path, "one")

    async def launch() -> Launch:
        raise FileNotFoundError("no such program")

    broken = replace(broken, launch=launch)
    async with supervised(tmp_path, [broken]) as supervisor:
        with pytest.raises(ServiceFailed, match="it cannot be started: no such program"):
            await supervisor.start()


async def test_a_service_that_is_never_ready_fails_at_its_deadline(tmp_path: Path) -> None:
    idle = service(tmp_path, "idle", "import time; time.sleep(600)", ready_timeout_s=0.2)
    async with supervised(tmp_path, [idle]) as supervisor:
        with pytest.raises(ServiceFailed, match=r"it was not ready after 0\.2 s \(FileNotFoundError"):
            await supervisor.start()
        assert supervisor.pids == set()


async def test_a_failed_action_fails_the_start(tmp_path: Path) -> None:
    async def refuse() -> None:
        raise ConnectionError("the ledger says no")

    async with supervised(tmp_path, [Action("ledger", refuse, timeout_s=DEADLINE_S)]) as supervisor:
        with pytest.raises(ServiceFailed, match="ledger does not start: the ledger says no"):
            await supervisor.start()


async def test_a_crash_loop_is_given_up_and_the_others_stay_up(tmp_path: Path) -> None:
    once = "import os, sys\nif os.path.exists(sys.argv[1] + '-spent'): sys.exit(4)\nopen(sys.argv[1] + '-spent', 'w')\n"
    members = [service(tmp_path, "steady"), service(tmp_path, "fragile", once + SERVE)]
    async with supervised(tmp_path, members) as supervisor:
        await supervisor.start()
        os.kill(pid(supervisor, "fragile"), signal.SIGKILL)
        await until(lambda: status(supervisor, "fragile").state == "failed")
        assert status(supervisor, "fragile").failures_in_a_row == QUICK.failures_in_a_row
        assert "given up after 4 failures in a row" in (status(supervisor, "fragile").reason or "")
        assert status(supervisor, "steady").state == "ready"


async def test_a_service_that_ignores_sigterm_is_killed_at_its_deadline(tmp_path: Path) -> None:
    async with supervised(tmp_path, [service(tmp_path, "deaf", DEAF, stop_timeout_s=0.2)]) as supervisor:
        await supervisor.start()
        process = psutil.Process(pid(supervisor, "deaf"))
        await supervisor.stop()
        assert not process.is_running()


async def test_stopping_while_starting_leaves_nothing(tmp_path: Path) -> None:
    idle = service(tmp_path, "idle", "import time; time.sleep(600)")
    async with supervised(tmp_path, [idle, service(tmp_path, "later", after=("idle",))]) as supervisor:
        starting = asyncio.create_task(supervisor.start())
        await until(lambda: bool(supervisor.pids))
        process = psutil.Process(pid(supervisor, "idle"))
        await supervisor.stop()
        starting.cancel()
        assert not process.is_running()
        assert status(supervisor, "later").process is None
