"""A migrated database for the session; a fresh run in it for each test."""

from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.databases import new_database
from tests.storage.building import Story, start_run


@pytest.fixture(scope="session")
async def storage_config(
    postgres_dsn: str, template_dsn: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[StorageConfig]:
    """The configuration of a database at the newest revision."""
    async with new_database(postgres_dsn, template_dsn) as dsn:
        yield StorageConfig(dsn=SecretStr(dsn), blobs_url=str(tmp_path_factory.mktemp("blobs")))


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
