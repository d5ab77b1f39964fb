"""A session of the command line against real servers, with a model folder and datasets on disk."""

import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from temporalio.service import RPCError

from configs.load import load_recipe, override_recipe
from configs.recipe import Recipe
from tests.cli.operating import Operated, operated
from workers.cli.session import Session, session_of
from workers.cli.starting import start_run

ROW = {"responses_create_params": {"input": "open the safe"}, "agent_ref": {"name": "safe_agent"}}


@pytest.fixture
def recipe(tmp_path: Path, migrated_dsn: str, temporal_address: str) -> Recipe:
    """The demo's recipe with every address given, on files that are just good enough to start a run."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text("{}")
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROW) + "\n")
    return load_recipe(
        "demo",
        [
            f"run.model={model}",
            f"run.dataset={tmp_path / 'train.jsonl'}",
            f"run.validation_dataset={tmp_path / 'validation.jsonl'}",
            f"storage.dsn={migrated_dsn}",
            f"temporal.address={temporal_address}",
            f"storage.blobs_url={tmp_path / 'blobs'}",
            f"temporal.task_queue={tmp_path.name}",
            "temporal.ui_url=http://127.0.0.1:8233/",
            'generation.endpoints=["http://127.0.0.1:9"]',
            'gym={"agents": {"safe_agent": "http://127.0.0.1:9"}}',
            "storage.inline_payload_bytes=0",
            "grpo.num_generations_per_prompt=3",
            "failure.max_infra_attempts_per_prompt=1",
        ],
    )


@pytest.fixture
async def session(recipe: Recipe) -> AsyncIterator[Session]:
    async with session_of(recipe) as opened:
        yield opened


@pytest.fixture
async def run(session: Session, tmp_path: Path) -> AsyncIterator[Operated]:
    """A run in flight, with workers; it waits for its first weights."""
    name = f"run.id=run-{uuid.uuid4().hex[:12]}"  # tests share one Temporal service
    run_id = await start_run(dataclasses.replace(session, recipe=override_recipe(session.recipe, [name])), "demo")
    async with operated(session, run_id, tmp_path) as operating:
        yield operating
        for open_one in [one async for one in session.client.list_workflows('ExecutionStatus = "Running"')]:
            with suppress(RPCError):
                await session.client.get_workflow_handle(open_one.id, run_id=open_one.run_id).terminate()
