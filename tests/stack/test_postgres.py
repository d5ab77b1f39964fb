"""The embedded PostgreSQL with installed programs and with those of the wheel."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import psutil
import pytest

from tests.stack.children import DEADLINE_S, until
from workers.stack.accounts import server_account
from workers.stack.child import running
from workers.stack.errors import BinariesMissing
from workers.stack.ports import free_port
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.postgres_binaries import Binaries, find_binaries, installed_binaries, wheel_binaries
from workers.stack.restarts import RestartPolicy
from workers.stack.supervisor import Supervisor

pytestmark = pytest.mark.integration


def programs(source: str) -> Binaries:
    found = installed_binaries() if source == "installed" else wheel_binaries(server_account())
    if not found:
        pytest.skip(f"no PostgreSQL programs: {source}")
    return found[0]


@asynccontextmanager
async def folder_of(tmp_path: Path, binaries: Binaries) -> AsyncIterator[EmbeddedPostgres]:
    postgres = EmbeddedPostgres(tmp_path, free_port(), binaries)
    try:
        yield postgres
    finally:
        postgres.delete()


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("postgres")


@pytest.fixture(scope="module")
def postgres(state_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A server for several tests, which start it and leave it stopped: to make its data takes the longest."""
    made = EmbeddedPostgres(state_dir, free_port(), find_binaries(server_account()))
    yield made
    made.delete()


async def fetch(postgres: EmbeddedPostgres, query: str) -> object:
    connection = await asyncpg.connect(postgres.dsn, timeout=DEADLINE_S)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


@pytest.mark.parametrize("source", ["installed", "wheel"])
async def test_a_committed_row_survives_the_death_of_the_server(tmp_path: Path, source: str) -> None:
    async with folder_of(tmp_path, programs(source)) as postgres:
        policy = RestartPolicy(first_wait_s=0.1, longest_wait_s=0.5)
        supervisor = Supervisor([postgres.service()], tmp_path / "logs", policy=policy)
        try:
            await supervisor.start()
            await fetch(postgres, "create table kept (value int)")
            await fetch(postgres, "insert into kept values (7)")
            (first,) = supervisor.pids
            os.kill(first, signal.SIGKILL)
            await until(lambda: supervisor.statuses[0].state == "ready" and supervisor.pids != {first}, 60)
            assert await fetch(postgres, "select value from kept") == 7
        finally:
            await supervisor.stop()


async def test_the_server_listens_on_loopback_only_and_wants_its_password(
    postgres: EmbeddedPostgres, state_dir: Path, tmp_path: Path
) -> None:
    async with running(postgres.service(), tmp_path / "postgres.log") as child:
        sockets = psutil.Process(child.identity.pid).net_connections(kind="tcp")
        assert {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
        assert not psutil.Process(child.identity.pid).net_connections(kind="unix")
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(postgres.dsn.replace("://onbelay:", "://onbelay:x"), timeout=DEADLINE_S)
        if os.geteuid() == 0:
            assert psutil.Process(child.identity.pid).username() != "root"
    assert (state_dir / "postgres.password").stat().st_mode & 0o077 == 0


async def test_data_of_a_version_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("9\n")
    with pytest.raises(BinariesMissing, match="is of PostgreSQL 9, and only"):
        find_binaries(server_account(), tmp_path)


async def test_the_lock_of_a_dead_server_does_not_hinder_a_start(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    async with running(postgres.service(), tmp_path / "postgres.log"):
        pass
    lock = postgres.data / "postmaster.pid"
    lock.write_text(f"{os.getpid()}\n")  # the pid was given to a process that is no server
    async with running(postgres.service(), tmp_path / "postgres.log"):
        assert await fetch(postgres, "select 1") == 1


async def test_the_pid_of_another_server_in_the_lock_hinders_no_start_and_leaves_that_server_alone(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    async with running(postgres.service(), tmp_path / "postgres.log"):
        pass
    async with (
        folder_of(tmp_path / "other", find_binaries(server_account())) as other,
        running(other.service(), tmp_path / "other.log") as living,
    ):
        (postgres.data / "postmaster.pid").write_text(f"{living.identity.pid}\n{postgres.data}\n")
        async with running(postgres.service(), tmp_path / "postgres.log"):
            assert await fetch(postgres, "select 1") == 1
        assert living.identity.is_alive()
        assert await fetch(other, "select 1") == 1


async def test_a_busy_session_of_a_killed_server_does_not_hinder_the_next_start(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    async with running(postgres.service(), tmp_path / "postgres.log") as child:
        await fetch(postgres, "create table busy (value int)")
        busy = asyncio.create_task(fetch(postgres, "select count(*) from (select generate_series(1, 1000000000000)) s"))
        await until(lambda: bool(_sessions_in_a_query(child.identity.pid)))
        (session,) = _sessions_in_a_query(child.identity.pid)
        os.kill(child.identity.pid, signal.SIGKILL)
    assert session.is_running()  # it notices its server's death only when it waits for something
    async with running(postgres.service(), tmp_path / "postgres.log"):
        assert await fetch(postgres, "select count(*) from busy") == 0
    assert not session.is_running()
    with pytest.raises((asyncpg.PostgresError, OSError)):
        await busy


def _sessions_in_a_query(server: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.Process(server).children():
        with suppress(psutil.Error):  # an older session has just ended
            if "SELECT" in " ".join(process.cmdline()):
                found.append(process)
    return found


async def test_a_removed_state_folder_means_an_empty_ledger(tmp_path: Path) -> None:
    async with folder_of(tmp_path, find_binaries(server_account())) as postgres:
        async with running(postgres.service(), tmp_path / "postgres.log"):
            await fetch(postgres, "create table old (value int)")
        (tmp_path / "postgres.password").unlink()
        again = EmbeddedPostgres(tmp_path, free_port())
        async with running(again.service(), tmp_path / "postgres.log"):
            assert await fetch(again, "select to_regclass('old')") is None
