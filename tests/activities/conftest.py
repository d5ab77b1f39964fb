"""A run in a real ledger, an agent on a real socket, a model server that records, a vLLM server without a model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.activities.model_server import ModelServer
from tests.activities.world import World, start_run
from tests.databases import new_database
from tests.generation.fake_vllm import FakeVllm, serving
from tests.rollouts.agent_server import AgentServer
from tests.rollouts.building import real_answer


@pytest.fixture(scope="session")
async def ledger_dsn(postgres_dsn: str, template_dsn: str) -> AsyncIterator[str]:
    """Address of a migrated database for the session."""
    async with new_database(postgres_dsn, template_dsn) as dsn:
        yield dsn


@pytest.fixture(scope="session")
async def ledger(ledger_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ledger]:
    """The ledger in that database; each test has a run of its own."""
    database = Database(StorageConfig(dsn=SecretStr(ledger_dsn)))
    yield Ledger(database, BlobStore(str(tmp_path_factory.mktemp("blobs"))))
    await database.close()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Six rows, the last for an agent that does not run."""
    path = tmp_path / "rows.jsonl"
    agents = ["safe_agent"] * 5 + ["absent_agent"]
    rows = [
        {"prompt_id": f"safe-{number}", "responses_create_params": {"input": "climb"}, "agent_ref": {"name": agent}}
        for number, agent in enumerate(agents)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
async def world(ledger: Ledger, dataset: Path, tmp_path: Path) -> AsyncIterator[World]:
    """A run at policy version 0; its agent plays as the compaction agent did."""
    run_id = await start_run(ledger, dataset, tmp_path)
    model = ModelServer(ledger)
    async with AgentServer(model.serving(real_answer("compaction"))) as agent:
        with serving(FakeVllm(label="policy-0", digest="d" * 64)) as vllm:
            world = World(ledger, run_id, dataset, tmp_path, agent, model, vllm)
            yield world
            await world.close()
