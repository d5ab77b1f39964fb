"""The embedded PostgreSQL: made once, reached over loopback TCP with a generated password, never by a Unix socket.

A server that died without cleaning up is started again on the same data; what was committed is there.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
from pathlib import Path

import asyncpg
import psutil

from workers.stack.accounts import Account, server_account, server_folder
from workers.stack.errors import StackError
from workers.stack.ports import LOOPBACK
from workers.stack.postgres_binaries import Binaries, find_binaries
from workers.stack.service import Launch, Service

USER = "onbelay"
DATABASE = "onbelay"
INIT_TIMEOUT_S = 120.0
LEFTOVER_TIMEOUT_S = 10.0
QUERY_TIMEOUT_S = 5
SETTINGS = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "password_encryption": "scram-sha-256",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
}


class EmbeddedPostgres:
    """One server with its data under the state folder (or where its account can reach it)."""

    def __init__(self, state_dir: Path, port: int, binaries: Binaries | None = None) -> None:
        self.port = port
        self._account: Account = server_account()
        self._folder = server_folder(state_dir, self._account)
        self._data = self._folder / "data"
        self._password = self._know_password(state_dir / "postgres.password")
        self._binaries = binaries or find_binaries(self._account, self._data)

    @property
    def dsn(self) -> str:
        """Address of the ledger's database, password included."""
        return f"postgresql://{USER}:{self._password}@{LOOPBACK}:{self.port}/{DATABASE}"

    @property
    def data(self) -> Path:
        """The data folder."""
        return self._data

    def service(self) -> Service:
        """The supervised server. SIGINT is PostgreSQL's fast shutdown: sessions end, committed data is flushed."""
        return Service(
            name="postgres",
            launch=self.launch,
            ready=self.ready,
            ready_timeout_s=120.0,
            stop_signal=signal.SIGINT,
            stop_timeout_s=30.0,
            address=f"{LOOPBACK}:{self.port}",
        )

    async def launch(self) -> Launch:
        """Create the data folder if there is none, forget a dead server's lock, and name the command."""
        if not (self._data / "PG_VERSION").exists():
            await self._initialise()
        await asyncio.to_thread(self._forget_dead_server)
        settings = [part for key, value in SETTINGS.items() for part in ("-c", f"{key}={value}")]
        argv = (str(self._binaries.folder / "postgres"), "-D", str(self._data), "-p", str(self.port), *settings)
        return Launch(argv, env=_ENVIRONMENT, user=self._account.name)

    async def ready(self) -> None:
        """Answers a query, and the ledger's database exists."""
        connection = await asyncpg.connect(
            host=LOOPBACK,
            port=self.port,
            user=USER,
            password=self._password,
            database="postgres",
            timeout=QUERY_TIMEOUT_S,
            command_timeout=QUERY_TIMEOUT_S,
        )
        try:
            if not await connection.fetchval("select 1 from pg_database where datname = $1", DATABASE):
                await connection.execute(f'create database "{DATABASE}"', timeout=30.0)
        finally:
            await connection.close()

    def delete(self) -> None:
        """Remove the data of a stopped server."""
        shutil.rmtree(self._folder)

    def _know_password(self, path: Path) -> str:
        """The password, made once and readable by its owner only.

        Data without its password belongs to a state folder that was removed: it is set aside, for a fresh start.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(24))
                file.flush()
                os.fsync(file.fileno())  # without it, the data would be lost
            if self._data.exists():
                aside = self._data.with_name("data.removed")
                shutil.rmtree(aside, ignore_errors=True)
                self._data.rename(aside)
        return path.read_text().strip()

    async def _initialise(self) -> None:
        """`initdb` into a scratch folder that is renamed when complete."""
        scratch = self._folder / f"data.{os.getpid()}"
        shutil.rmtree(scratch, ignore_errors=True)
        password_file = self._folder / f"password.{os.getpid()}"
        scratch.mkdir(mode=0o700)
        password_file.touch(mode=0o600)
        password_file.write_text(self._password + "\n")
        if self._account.name is not None:
            os.chown(scratch, self._account.uid, self._account.gid)
            os.chown(password_file, self._account.uid, self._account.gid)
        try:
            initdb = await asyncio.create_subprocess_exec(
                str(self._binaries.folder / "initdb"),
                *("-D", str(scratch), "-U", USER, "-A", "scram-sha-256", f"--pwfile={password_file}"),
                *("--encoding=UTF8", "--locale=C"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_ENVIRONMENT,
                cwd="/",
                user=self._account.name,
            )
            output, _ = await asyncio.wait_for(initdb.communicate(), INIT_TIMEOUT_S)
            if initdb.returncode != 0:
                raise StackError(
                    f"initdb could not make a database in {scratch}: {output.decode(errors='replace').strip()}"
                )
            scratch.rename(self._data)
        finally:
            password_file.unlink(missing_ok=True)
            shutil.rmtree(scratch, ignore_errors=True)

    def _forget_dead_server(self) -> None:
        """End what still holds the data folder, and remove the lock of its server.

        Only one supervisor serves the folder, and it starts the server only when none of its own runs. A session that
        outlives its killed server locks the data until it notices; a pid file names a pid that anybody may have now.
        """
        left = [process for process in psutil.process_iter() if _works_in(process, self._data)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGQUIT)  # at once; what is committed is in the write-ahead log
        _, alive = psutil.wait_procs(left, timeout=LEFTOVER_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=LEFTOVER_TIMEOUT_S)
        (self._data / "postmaster.pid").unlink(missing_ok=True)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    """Whether it is a PostgreSQL process of this data folder: they all make it their working folder."""
    try:
        return process.name() == "postgres" and Path(process.cwd()) == folder
    except (psutil.Error, OSError):
        return False


_ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
