"""The schema of the ledger: migrated once, by whoever sets the stack up; workers only check it.

Migrations run in one transaction under an advisory lock, so two processes that migrate at once take turns, and a
migration that fails leaves the schema as it was.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from configs.storage import StorageConfig
from storage.database import Database
from storage.errors import SchemaOutdated

MIGRATION_TIMEOUT_S = 600
LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('onbelay/migrate', 0))")


def alembic_config(connection: Connection | None = None) -> Config:
    """alembic's configuration, without a file; `env.py` finds the connection in its attributes."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


async def migrate(config: StorageConfig) -> None:
    """Bring the schema to the newest revision, as the owner of the tables. Raises SchemaOutdated when a newer release
    made it, RoleMissing when the application's role is not there and cannot be created."""
    database = Database(config, role=None)
    try:
        async with database.transaction() as session:
            await session.execute(text(f"SET LOCAL statement_timeout = '{MIGRATION_TIMEOUT_S}s'"))
            await session.execute(LOCK)
            connection = await session.connection()
            found = await connection.run_sync(current_revision)
            revisions = ScriptDirectory.from_config(alembic_config())
            if found is not None and found not in {script.revision for script in revisions.walk_revisions()}:
                raise SchemaOutdated(database.address, found, newest_revision())
            await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "head"))
    finally:
        await database.close()


async def check_schema(database: Database) -> None:
    """Raise SchemaOutdated unless the schema is at the newest revision."""
    async with database.transaction() as session:
        found = await (await session.connection()).run_sync(current_revision)
    if found != newest_revision():
        raise SchemaOutdated(database.address, found, newest_revision())


def current_revision(connection: Connection) -> str | None:
    """The revision of the schema; None before the first migration."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str:
    """The revision this release needs."""
    return str(ScriptDirectory.from_config(alembic_config()).get_current_head())
