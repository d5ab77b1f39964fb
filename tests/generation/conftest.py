"""A run on two fake endpoints, and for the session one real vLLM server with a tiny random model."""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from tests.generation.fake_vllm import serving
from tests.generation.models import write_policy
from tests.generation.site import Site, SlowVllm
from workers.stack.child import running
from workers.stack.ports import free_port
from workers.stack.vllm import EmbeddedVllm
from workflows.messages import WeightsRef


@dataclass(frozen=True)
class ServedPolicy:
    """A server that was started with `weights[0]`; the others have the same shape. `log` is the server's output."""

    url: str
    weights: tuple[WeightsRef, ...]
    log: Path


@pytest.fixture(scope="session")
async def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedPolicy]:
    folder = tmp_path_factory.mktemp("vllm")
    weights = tuple(write_policy(folder / f"policy-{version}", version) for version in range(3))
    recipe = Recipe.model_validate(
        {
            "run": {"model": weights[0].path, "dataset": "rows.jsonl"},
            "generation": {"embedded": {"port": free_port(), "max_model_len": 2048}},
        }
    )
    vllm = EmbeddedVllm(recipe)
    async with running(vllm.service(), folder / "vllm.log"):
        yield ServedPolicy(vllm.url, weights, folder / "vllm.log")


@pytest.fixture
async def site(database_dsn: str, temporal_address: str, tmp_path: Path) -> AsyncIterator[Site]:
    storage = StorageConfig(dsn=SecretStr(database_dsn), blobs_url=str(tmp_path / "blobs"))
    await migrate(storage)
    database = Database(storage)
    ledger = Ledger(database, BlobStore(storage.blobs_url))
    await ledger.runs.create("run", "fleet", {}, "d" * 64, 1, "m" * 64)
    events: list[str] = []
    with serving(SlowVllm("a", events)) as one, serving(SlowVllm("b", events)) as other:
        assert isinstance(one, SlowVllm)
        assert isinstance(other, SlowVllm)
        for fake in (one, other):
            fake.go_on.set()
        recipe = Recipe.model_validate(
            {
                "run": {"model": "model", "dataset": "rows.jsonl"},
                "generation": {"endpoints": [one.url, other.url]},
                "temporal": {"address": temporal_address, "task_queue": f"fleet-{uuid.uuid4().hex}"},
                "storage": {"dsn": database_dsn},
            }
        )
        yield Site(ledger, database, recipe, tmp_path, (one, other))
    await database.close()
