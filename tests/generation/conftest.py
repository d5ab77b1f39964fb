"""A run on two fake endpoints, and for the session one real vLLM server with a tiny random model."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.generation.fake_vllm import serving
from tests.generation.served import ServedPolicy, serving_policy
from tests.generation.site import Site, SlowVllm


@pytest.fixture(scope="session")
async def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedPolicy]:
    async with serving_policy(tmp_path_factory.mktemp("vllm")) as served:
        yield served


@pytest.fixture
async def site(migrated_dsn: str, temporal_address: str, tmp_path: Path) -> AsyncIterator[Site]:
    storage = StorageConfig(dsn=SecretStr(migrated_dsn), blobs_url=str(tmp_path / "blobs"))
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
                "storage": {"dsn": migrated_dsn},
            }
        )
        yield Site(ledger, database, recipe, tmp_path, (one, other))
    await database.close()
