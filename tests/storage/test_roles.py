"""The application's role: made by whoever migrates first, and missed with instructions."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from configs.storage import StorageConfig
from storage.database import Database
from storage.errors import RoleMissing
from storage.migrate import check_schema, migrate
from storage.migrations.grants import CREATE
from tests.databases import new_database
from tests.storage.building import migrating_process

pytestmark = pytest.mark.integration

ROLE = "onbelay_app"


@pytest.fixture
async def databases(postgres_dsn: str, newcomer: str) -> AsyncIterator[list[StorageConfig]]:
    """Three empty databases of one server, in which the newcomer may own things."""
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(new_database(postgres_dsn)) for _ in range(3)]
        yield [StorageConfig(dsn=SecretStr(dsn)) for dsn in made]


@pytest.fixture
async def newcomer(postgres_dsn: str) -> AsyncIterator[str]:
    """A user that owns nothing and may create no roles; its password is its name."""
    name = f"user_{uuid.uuid4().hex}"
    administration = await asyncpg.connect(postgres_dsn)
    await administration.execute(f"create user {name} password '{name}'")
    yield name
    await administration.execute(f"drop user {name}")
    await administration.close()


def dsn_of(config: StorageConfig) -> str:
    """The address in the clear."""
    assert config.dsn is not None
    return config.dsn.get_secret_value()


def as_user(config: StorageConfig, name: str) -> StorageConfig:
    """The same database under another user."""
    url = make_url(dsn_of(config)).set(username=name, password=name)
    return config.model_copy(update={"dsn": SecretStr(url.render_as_string(hide_password=False))})


async def test_databases_of_one_server_may_be_migrated_at_the_same_time(databases: list[StorageConfig]) -> None:
    assert await asyncio.gather(*(migrating_process(dsn_of(config)) for config in databases)) == [(0, "")] * 3

    for config in databases:
        database = Database(config)
        await check_schema(database)
        await database.close()


async def test_role_made_by_many_at_once_is_made_once(databases: list[StorageConfig]) -> None:
    role = f"role_{uuid.uuid4().hex}"
    connections = [await asyncpg.connect(dsn_of(config)) for config in databases for _ in range(3)]

    await asyncio.gather(*(connection.execute(CREATE.replace(ROLE, role)) for connection in connections))

    assert await connections[0].fetchval("select pg_has_role(current_user, $1, 'MEMBER')", role)
    await connections[0].execute(f"drop role {role}")
    for connection in connections:
        await connection.close()


async def test_user_that_may_not_act_as_the_role_is_told_what_an_administrator_types(
    databases: list[StorageConfig], newcomer: str
) -> None:
    await migrate(databases[0])

    database = Database(as_user(databases[0], newcomer))
    with pytest.raises(RoleMissing, match=f'GRANT {ROLE} TO "{newcomer}";') as refused:
        await database.ping()
    await database.close()
    assert "CREATE ROLE onbelay_app NOLOGIN;" in str(refused.value)


async def test_migration_by_a_user_that_may_not_create_the_role_names_it_and_leaves_nothing(
    databases: list[StorageConfig], newcomer: str
) -> None:
    config = as_user(databases[0], newcomer)
    administration = await asyncpg.connect(dsn_of(databases[0]))
    await administration.execute(f"alter schema public owner to {newcomer}")

    with pytest.raises(RoleMissing, match=rf"CREATE ROLE {ROLE} NOLOGIN; and GRANT {ROLE} TO \"{newcomer}\";"):
        await migrate(config)
    assert await administration.fetch("select from pg_tables where schemaname = 'public'") == []

    await administration.execute(f"grant {ROLE} to {newcomer}")
    await migrate(config)
    database = Database(config)
    await check_schema(database)
    await database.close()
    await administration.close()
