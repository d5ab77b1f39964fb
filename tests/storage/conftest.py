"""A migrated database for the session; a fresh run in it for each test."""

import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from tests.storage.building import Story, start_run


@pytest.fixture(scope="session")
async def storage_config(postgres_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StorageConfig]:
    """The configuration of a database at the newest revision."""
    name = f"storage_{uuid.uuid4().hex}"
    administration = await asyncpg.connect(postgres_dsn)
    await administration.execute(f'create database "{name}"')
    try:
        dsn = SecretStr(f"{postgres_dsn.rsplit('/', 1)[0]}/{name}")
        config = StorageConfig(dsn=dsn, blobs_url=str(tmp_path_factory.mktemp("blobs")))
        await migrate(config)
        yield config
    finally:
        await administration.execute(f'drop database "{name}" with (force)')
        await administration.close()


@pytest.fixture(scope="session")
async def database(storage_config: StorageConfig) -> AsyncIterator[Database]:
    """A pool of connections to it."""
    database = Database(storage_config)
    yield database
    await database.close()


@pytest.fixture(scope="session")
async def owner(storage_config: StorageConfig) -> AsyncIterator[Database]:
    """The same as the owner of the tables, who may do what the application may not."""
    database = Database(storage_config, role=None)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def blobs(storage_config: StorageConfig) -> BlobStore:
    """The blob store of large model calls."""
    return BlobStore(storage_config.blobs_url)


@pytest.fixture(scope="session")
async def ledger(database: Database, blobs: BlobStore) -> Ledger:
    """The ledger in it."""
    return Ledger(database, blobs)


@pytest.fixture
async def story(ledger: Ledger) -> Story:
    """A fresh run."""
    return Story(ledger, (await start_run(ledger)).run_id)


@pytest.fixture
async def rollout_id(story: Story) -> str:
    """A rollout whose attempt 0 has begun."""
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    return rollout_id
