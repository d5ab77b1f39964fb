"""The connection to PostgreSQL: one pool per process, one transaction per call, every wait bounded.

Whatever means "the server is not there, or did not answer in time" leaves here as `LedgerUnavailable`, which a caller
may retry: no transaction is half applied, and every write of the ledger is idempotent.
"""

# pyright: reportMissingTypeStubs=false
# (the driver comes without stubs)

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from asyncpg import InterfaceError, InternalClientError
from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import PoolProxiedConnection

from configs.storage import StorageConfig
from storage.errors import APPLICATION_ROLE, DsnInvalid, LedgerUnavailable, RoleMissing

CONNECT_TIMEOUT_S = 10.0
POOL_TIMEOUT_S = 30.0

# SQLSTATE classes that say nothing about the statement: connection, rollback (deadlock), resources, operator, system.
PASSING_SQLSTATES = ("08", "40", "53", "57", "58")

# The role does not exist, or the user may not act as it.
ROLE_SQLSTATES = ("22023", "42501")


class Database:
    """The engine and its sessions."""

    def __init__(self, config: StorageConfig, role: str | None = APPLICATION_ROLE) -> None:
        """`role` None: as the DSN's own user, which owns the tables. Only migrations need that."""
        url = database_url(config)
        self.address = address_of(url)
        self.inline_payload_bytes = config.inline_payload_bytes
        self._user = url.username or ""
        self._engine = create_engine(url, config.pool_size, config.statement_timeout_s, role)
        self._single_statements = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    async def ping(self) -> None:
        """One round trip."""
        async with self.transaction() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection of the pool."""
        await self._engine.dispose()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncSession]:
        """A transaction that commits when the block ends and leaves nothing behind when it raises."""
        async with self._sessions() as session:
            async with self._translated(connecting=True):
                await session.connection()
            async with self._translated():
                yield session
                await session.commit()

    @asynccontextmanager
    async def statement(self) -> AsyncGenerator[AsyncConnection]:
        """For one statement, which is a transaction of its own: no round trips to begin and to commit."""
        async with AsyncExitStack() as closing:
            async with self._translated(connecting=True):
                connection = await closing.enter_async_context(self._single_statements.connect())
            async with self._translated():
                yield connection

    async def fetch_row(self, statement: str, values: Sequence[Any]) -> Mapping[str, Any] | None:
        """The same by the driver itself, with `$1` for the first value: half a millisecond less, and errors are its."""
        async with self.statement() as connection:
            driver_connection: Any = (await connection.get_raw_connection()).driver_connection
            try:
                return await driver_connection.fetchrow(statement, *values)
            except (InterfaceError, InternalClientError, OSError) as error:
                raise LedgerUnavailable(self.address, one_line(error)) from error

    @asynccontextmanager
    async def snapshot(self) -> AsyncGenerator[AsyncSession]:
        """A read-only transaction in which all statements see the same moment."""
        async with self._sessions() as session:
            async with self._translated(connecting=True):
                await session.connection(
                    execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                )
            async with self._translated():
                yield session

    @asynccontextmanager
    async def _translated(self, *, connecting: bool = False) -> AsyncGenerator[None]:
        try:
            yield
        except Exception as error:  # the driver raises its own types while it connects
            cause = error.orig if isinstance(error, DBAPIError) else error
            if connecting and getattr(cause, "sqlstate", None) in ROLE_SQLSTATES and APPLICATION_ROLE in str(cause):
                raise RoleMissing(self.address, self._user, one_line(cause)) from error
            if connecting or passes(error):
                raise LedgerUnavailable(self.address, one_line(cause)) from error
            raise


def database_url(config: StorageConfig) -> URL:
    """The URL of the asyncpg dialect; libpq's `sslmode` becomes asyncpg's `ssl`."""
    if config.dsn is None:
        raise DsnInvalid("is not set")
    try:
        url = make_url(config.dsn.get_secret_value())
    except (ArgumentError, ValueError):
        raise DsnInvalid("is not a URL") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise DsnInvalid(f"names {url.get_backend_name()!r}, not postgresql")
    if not url.database:
        raise DsnInvalid("names no database")
    query = dict(url.query)
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername="postgresql+asyncpg", query=query)


def create_engine(url: URL, pool_size: int, statement_timeout_s: float, role: str | None) -> AsyncEngine:
    """An engine whose connections all have the same bounds and the same role."""
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "server_settings": {
                "application_name": "onbelay",
                "statement_timeout": f"{statement_timeout_s * 1000:.0f}",
                "timezone": "UTC",
                **({} if role is None else {"role": role}),
            },
        },
    )
    event.listen(engine.sync_engine, "checkout", _replace_if_closed)
    return engine


def _replace_if_closed(connection: PoolProxiedConnection, *_: object) -> None:
    """What the server has closed meanwhile is not used again. A ping would tell too, in three round trips."""
    driver_connection: Any = connection.driver_connection
    if driver_connection is None or driver_connection.is_closed():
        raise DisconnectionError("the server closed the connection")


def address_of(url: URL) -> str:
    """host:port/database, for messages; never the password."""
    host = url.host or url.query.get("host") or "localhost"
    port = url.port or url.query.get("port") or 5432
    return f"{host}:{port}/{url.database}"


def passes(error: Exception) -> bool:
    """Whether an error of SQLAlchemy or of the driver says that the same call may succeed later."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    cause = error.orig if isinstance(error, DBAPIError) else error
    sqlstate: str | None = getattr(cause, "sqlstate", None)
    return sqlstate is not None and sqlstate.startswith(PASSING_SQLSTATES)


def one_line(error: BaseException | None) -> str:
    """The cause in one line. A timeout has no text of its own."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return " ".join(str(error).split()) or type(error).__name__
