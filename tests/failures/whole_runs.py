"""Whole runs: the workers of all queues in this process, the trainer's engine included, on the servers of a World.

Two worlds, each with a ledger of its own, may run a run of the same id: that is how runs are compared.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from activities.training.ranks import Ranks
from activities.training.trainer import Trainer
from activities.training_activities import TrainingActivities
from configs.load import dump_recipe
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.database import Database
from storage.records import GroupRecord
from storage.summaries import RunSummary
from tests.failures.world import DEADLINE_S, TOOL, World, until_parked
from tests.gym.byte_language import VOCABULARY
from workers import generation_worker, rollout_worker
from workers.cli.main import app
from workers.cli.session import session_of
from workers.cli.starting import start_run
from workers.worker_process import Resources, new_worker
from workflows.messages import Bucket, RunResult
from workflows.training_run import TrainingRun

PROMPTS, ROLLOUTS = 4, 2
MODEL_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY + 6,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}


def write_policy(folder: Path) -> Path:
    """A model that has a row for every byte; its tokenizer is a stand-in, nobody reads it."""
    Qwen3ForCausalLM(Qwen3Config(**MODEL_SIZES)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text('{"model": "stand-in"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@dataclass
class WholeRun:
    """A TrainingRun that was started. `recipe_file` has every address, for the command line."""

    world: World
    id: str
    recipe_file: Path
    handle: WorkflowHandle[TrainingRun, RunResult]

    async def end(self) -> RunSummary:
        """Wait for its end, which is no failure; nothing in the ledger breaks an invariant."""
        async with asyncio.timeout(DEADLINE_S):
            await self.handle.result()
        return await self.accounts()

    async def accounts(self) -> RunSummary:
        """The accounts of the run, which add up."""
        assert await self.world.ledger.checks.of(self.id) == []
        summary = await self.world.ledger.summaries.of(self.id)
        assert summary.identity_holds
        return summary

    async def group(self, state: str, bucket: Bucket | None = None) -> GroupRecord:
        """The first group that comes to be in a state, counted in a bucket where one is given: a run that fails cancels
        other groups, which are dropped too, without a bucket. One that is parked takes requests."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                groups = await self.world.ledger.groups.list(self.id, purpose="train")
                found = next((g for g in groups if g.state == state and bucket in (None, g.bucket)), None)
                if found is not None:
                    break
                await asyncio.sleep(0.05)
        if state == "parked":
            await until_parked(self.world.client, found.group_id)
        return found

    async def onbelay(self, *arguments: str) -> tuple[int, str]:
        """A command against the servers of this run: its exit code, and what it printed."""
        command = [*arguments, "--recipe", str(self.recipe_file)]
        ended = await asyncio.to_thread(CliRunner().invoke, app, command)
        return ended.exit_code, ended.output


class WholeRuns:
    """Starts runs, one at a time: they share a task queue."""

    def __init__(self, world: World, addresses: dict[str, Any], policy: Path, temporal_ui: str) -> None:
        self.world = world
        self.temporal_ui = temporal_ui
        self._addresses = addresses
        self._policy = policy

    async def start(
        self, agent: str = "simple", steps: int = 1, name: str | None = None, **sections: dict[str, Any]
    ) -> WholeRun:
        """A run of so many steps of 4 prompts x 2 rollouts; `sections` change those of its recipe, `name` is its id."""
        name = name or f"run-{uuid.uuid4().hex[:12]}"
        folder = self.world.folder / name
        folder.mkdir()
        self.world.episode.marker = name
        rows = [
            {
                "responses_create_params": {
                    "input": [{"role": "user", "content": f"Use the tool for {name}, prompt {number}."}],
                    "tools": [TOOL],
                },
                "agent_ref": {"type": "responses_api_agents", "name": agent},
            }
            for number in range(PROMPTS * (steps + 1))
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe = _recipe(self._addresses, self._policy, folder, name, steps, sections)
        recipe_file = folder / "recipe.yaml"
        recipe_file.write_text(dump_recipe(recipe, reveal_secrets=True))
        async with session_of(recipe) as session:
            run_id = await start_run(session, name)
        handle = self.world.client.get_workflow_handle_for(TrainingRun.run, run_id)
        return WholeRun(self.world, run_id, recipe_file, handle)


def _recipe(
    addresses: dict[str, Any], policy: Path, folder: Path, name: str, steps: int, sections: dict[str, dict[str, Any]]
) -> Recipe:
    changed: dict[str, dict[str, Any]] = {
        **addresses,
        "run": {"id": name, "model": str(policy), "dataset": str(folder / "rows.jsonl")},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": ROLLOUTS,
            "max_num_steps": steps,
            "loss_fn": {"reference_policy_kl_penalty": 0.0},
        },
        "rollouts": {"rollout_timeout_s": 60.0, "heartbeat_timeout_s": 30.0, "min_valid_rollouts_per_group": 1},
        "failure": {"backoff_base_s": 0.05, "max_backoff_s": 0.1},
        "training": {"output_dir": str(folder / "training"), "max_row_tokens": 4096, "threads": 1},
    }
    for section, values in sections.items():
        changed[section] = changed.get(section, {}) | values
    return Recipe.model_validate(changed)


@asynccontextmanager
async def whole_runs(
    world: World,
    storage: dict[str, Any],
    temporal_address: str,
    temporal_ui: str,
    folder: Path,
    *,
    policy: Path | None = None,
    agents: dict[str, str] | None = None,
    rollouts_apart: bool = False,
) -> AsyncIterator[WholeRuns]:
    """Workers of all queues, which are named after the folder; `rollouts_apart`: of all but the rollouts', whose worker
    reads `folder/recipe.yaml`."""
    served = {name: url for name, url in world.gym.urls.items() if not name.endswith("_model")}
    addresses = {
        "storage": storage,
        "temporal": {"address": temporal_address, "task_queue": folder.name, "ui_url": temporal_ui},
        "generation": {"endpoints": [world.vllm.url], "refit_timeout_s": 10.0},
        "gym": {"agents": served if agents is None else agents},
    }
    policy = policy or write_policy(folder / "policy")
    recipe = _recipe(addresses, policy, folder, "workers", 1, {})
    (folder / "recipe.yaml").write_text(dump_recipe(recipe, reveal_secrets=True))

    def give_up(cause: str) -> None:
        raise AssertionError(f"the trainer must not give up: {cause}")

    async with AsyncExitStack() as closing:
        database = Database(StorageConfig.model_validate(storage))
        closing.push_async_callback(database.close)
        resources = Resources(world.client, recipe, database, closing)
        training = TrainingActivities(world.ledger, world.blobs, Trainer(Ranks(), give_up))
        trainer = new_worker(
            world.client,
            f"{folder.name}-trainer",
            activities=[training.train_step, training.publish_weights],
            max_concurrent_activities=1,
        )
        deciding, rollouts = await rollout_worker.build(resources)
        for worker in (
            deciding,
            *(() if rollouts_apart else (rollouts,)),
            *await generation_worker.build(resources),
            trainer,
        ):
            await closing.enter_async_context(worker)
        yield WholeRuns(world, addresses, policy, temporal_ui)
