"""The connection: every way of not reaching the server is one clear error, and a lost connection heals."""

import asyncio
import socket

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.engine import make_url

from configs.storage import StorageConfig
from storage.database import Database, database_url
from storage.errors import DsnInvalid, LedgerUnavailable


def config(dsn: str, statement_timeout_s: float = 30.0) -> StorageConfig:
    return StorageConfig(dsn=SecretStr(dsn), statement_timeout_s=statement_timeout_s)


@pytest.mark.parametrize(
    ("dsn", "cause"),
    [
        (None, "is not set"),
        ("no url at all", "is not a URL"),
        ("mysql://user:secret@host/db", "names 'mysql', not postgresql"),
        ("postgresql://user:secret@host:5432", "names no database"),
    ],
)
def test_dsn_that_cannot_be_one_is_named_without_its_password(dsn: str | None, cause: str) -> None:
    with pytest.raises(DsnInvalid, match=cause) as refused:
        database_url(StorageConfig(dsn=None if dsn is None else SecretStr(dsn)))
    assert "secret" not in str(refused.value)


def test_dsn_of_libpq_is_understood() -> None:
    url = database_url(config("postgres://user:p%40ss@host:6000/db?sslmode=require"))

    assert (url.drivername, url.password, url.port) == ("postgresql+asyncpg", "p@ss", 6000)
    assert dict(url.query) == {"ssl": "require"}


async def test_port_where_nothing_listens_is_named() -> None:
    with socket.socket() as reserved:  # bound, not listening
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        database = Database(config(f"postgresql://user:secret@127.0.0.1:{port}/db"))

        with pytest.raises(LedgerUnavailable, match=rf"127\.0\.0\.1:{port}/db") as refused:
            await database.ping()

    assert "secret" not in str(refused.value)
    await database.close()


@pytest.mark.integration
async def test_database_or_user_that_is_not_there_is_named(storage_config: StorageConfig) -> None:
    assert storage_config.dsn is not None
    url = make_url(storage_config.dsn.get_secret_value())
    for changed, name in ((url.set(database="nowhere"), "nowhere"), (url.set(username="nobody"), "nobody")):
        database = Database(config(changed.render_as_string(hide_password=False)))
        with pytest.raises(LedgerUnavailable, match=name):
            await database.ping()
        await database.close()


@pytest.mark.integration
async def test_statement_that_takes_too_long_is_given_up(storage_config: StorageConfig) -> None:
    database = Database(storage_config.model_copy(update={"statement_timeout_s": 1.0}))

    with pytest.raises(LedgerUnavailable, match="statement timeout"):
        async with database.transaction() as session:
            await session.execute(text("SELECT pg_sleep(60)"))

    await database.ping()
    await database.close()


@pytest.mark.integration
async def test_connections_that_the_server_ended_are_replaced(storage_config: StorageConfig) -> None:
    database, killer = Database(storage_config), Database(storage_config, role=None)
    end = text("SELECT pg_terminate_backend(:pid)")

    with pytest.raises(LedgerUnavailable):  # noqa: PT012 (the connection dies inside the transaction)
        async with database.transaction() as session:
            pid = await session.scalar(text("SELECT pg_backend_pid()"))
            async with killer.transaction() as other:
                await other.execute(end, {"pid": pid})
            await session.execute(text("SELECT 1"))

    async with database.transaction() as session:
        pid = await session.scalar(text("SELECT pg_backend_pid()"))
        connection = (await (await session.connection()).get_raw_connection()).driver_connection
    async with killer.transaction() as other:
        await other.execute(end, {"pid": pid})
    assert connection is not None
    async with asyncio.timeout(60):  # until the news is here
        while not connection.is_closed():
            await killer.ping()
    await database.ping()
    await database.close()
    await killer.close()


@pytest.mark.integration
async def test_block_that_raises_leaves_nothing_behind(owner: Database) -> None:
    with pytest.raises(RuntimeError, match="midway"):  # noqa: PT012 (the block is what is tested)
        async with owner.transaction() as session:
            await session.execute(text("CREATE TABLE half_written (id int)"))
            raise RuntimeError("midway")

    async with owner.transaction() as session:
        assert await session.scalar(text("SELECT to_regclass('half_written')")) is None


@pytest.mark.integration
async def test_error_of_the_caller_is_not_taken_for_one_of_the_server(database: Database) -> None:
    with pytest.raises(FileNotFoundError):
        async with database.transaction():
            raise FileNotFoundError("the caller's own")
