"""Launchers of the Gym servers that end with the tests, and a migrated ledger for those that record."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.databases import new_database
from tests.gym.forks import Forks
from tests.gym.launcher import Launcher, write_recipe
from tests.gym.orchestrator import Orchestrator
from tests.gym.policies import splitting
from tests.gym.recording_servers import sections
from tests.gym.sampling_vllm import SamplingVllm

PATIENCE_S = 120.0


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes of NeMo-Gym's environment that start at once."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="session")
async def storage(
    postgres_dsn: str, template_dsn: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Any]]:
    """The `storage` section of a recipe whose database is migrated."""
    async with new_database(postgres_dsn, template_dsn) as dsn:
        yield {"dsn": dsn, "blobs_url": str(tmp_path_factory.mktemp("blobs")), "record_timeout_s": PATIENCE_S}


@pytest.fixture(scope="session")
async def ledger(storage: dict[str, Any]) -> AsyncIterator[Ledger]:
    """The ledger in it."""
    database = Database(StorageConfig.model_validate(storage))
    yield Ledger(database, BlobStore(storage["blobs_url"]))
    await database.close()


@pytest.fixture(scope="session")
def shared_vllm() -> Iterator[SamplingVllm]:
    """What the shared servers sample from."""
    with SamplingVllm(splitting) as serving:
        yield serving


@pytest.fixture(scope="session")
def servers(
    shared_vllm: SamplingVllm, storage: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Addresses of the servers that record, in a process that was started as the stack does."""
    recipe = write_recipe(tmp_path_factory.mktemp("gym"), *sections(shared_vllm.url, storage))
    launcher = Launcher(recipe)
    try:
        yield launcher.wait_until_ready().urls
    finally:
        launcher.kill()


@pytest.fixture
def vllm(shared_vllm: SamplingVllm) -> SamplingVllm:
    """The policy that solves the safe, with nothing generated yet."""
    shared_vllm.policy = splitting
    shared_vllm.version = "policy-0"
    shared_vllm.generations.clear()
    shared_vllm.requests.clear()
    return shared_vllm


@pytest.fixture
def play(ledger: Ledger) -> Orchestrator:
    """The other side of /run."""
    return Orchestrator(ledger)


@pytest.fixture
def refusal(forks: Forks, tmp_path: Path) -> Callable[..., str]:
    """What the launcher says of a recipe with which it does not start."""
    return lambda *sections: Launcher(write_recipe(tmp_path, *sections), forks).refusal()


@pytest.fixture(scope="module")
def launch(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launcher]]:
    """Starts launchers that are stopped at the end of the module."""
    started: list[Launcher] = []

    def start(*sections: dict[str, Any]) -> Launcher:
        started.append(Launcher(write_recipe(tmp_path_factory.mktemp("gym"), *sections), forks))
        return started[-1].wait_until_ready()

    yield start
    for launcher in started:
        launcher.kill()
