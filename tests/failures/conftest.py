"""Everything real but the model: PostgreSQL, Temporal, workers, and a process of NeMo-Gym agents and environments."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Worker

from activities.generation.vllm import VllmServer
from activities.group_activities import GroupActivities
from activities.operator_activities import OperatorActivities
from activities.rollout_activities import RolloutActivities
from activities.run_context import RunContexts
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.databases import new_database
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import Episode, PolicyServer
from tests.failures.world import QUEUE, WatchedAgents, World
from tests.gym.stub_model import Reply, StubModel
from workers.worker_process import new_worker
from workflows.prompt_group import PromptGroup


@pytest.fixture(scope="session")
async def storage(
    postgres_dsn: str, template_dsn: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Any]]:
    """The `storage` section of all processes: one migrated database, one blob store."""
    async with new_database(postgres_dsn, template_dsn) as dsn:
        yield {"dsn": dsn, "blobs_url": str(tmp_path_factory.mktemp("blobs")), "record_timeout_s": 60.0}


@pytest.fixture(scope="session")
def vllm() -> Iterator[PolicyServer]:
    """The policy."""
    server = PolicyServer(Episode())
    server.start_over()
    with server:
        yield server


@pytest.fixture(scope="session")
def unrecorded() -> Iterator[StubModel]:
    """The vLLM server of a model server that does not record."""
    with StubModel(lambda messages: Reply("nothing", answer="done")) as server:
        yield server


@pytest.fixture(scope="session")
async def gym(
    vllm: PolicyServer, unrecorded: StubModel, storage: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GymProcess]:
    """The Gym process that all tests share."""
    with GymProcess(tmp_path_factory.mktemp("gym"), vllm.url, unrecorded.url, storage) as process:
        await process.start()
        yield process


@pytest.fixture(scope="module")
async def other_gym(
    vllm: PolicyServer, unrecorded: StubModel, storage: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GymProcess]:
    """A second Gym process, for one module."""
    only = ("policy_model", "compacting_model", "environment", "simple", "compacting")
    folder = tmp_path_factory.mktemp("other_gym")
    with GymProcess(folder, vllm.url, unrecorded.url, storage, only) as process:
        await process.start()
        yield process


@pytest.fixture(scope="session")
async def stack(
    storage: dict[str, Any],
    temporal_address: str,
    vllm: PolicyServer,
    gym: GymProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[World]:
    """Workers of all queues that a group needs, in this process."""
    database = Database(StorageConfig.model_validate(storage))
    blobs = BlobStore(storage["blobs_url"])
    ledger = Ledger(database, blobs)
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter)
    agents = WatchedAgents(gym.urls, 16, gym.environments)
    server = VllmServer(vllm.url, refit_timeout_s=10.0)
    contexts = RunContexts(ledger)
    groups, operating = GroupActivities(ledger), OperatorActivities(ledger)
    running = RolloutActivities(ledger, blobs, contexts, agents, (server,))
    ledger_activities = [groups.open_group, groups.lose_rollout, groups.seal_group, operating.record_action]
    deciding = Worker(client, task_queue=QUEUE, workflows=[PromptGroup], activities=ledger_activities, debug_mode=True)
    async with deciding, new_worker(client, f"{QUEUE}-rollouts", activities=[running.run_rollout]):
        yield World(ledger, blobs, client, vllm, gym, agents, tmp_path_factory.mktemp("runs"))
    await agents.close()
    await server.close()
    await database.close()


@pytest.fixture
def world(stack: World) -> World:
    """The servers, with an undisturbed policy."""
    stack.vllm.start_over()
    return stack
