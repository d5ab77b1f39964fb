"""What the benchmark runs against: PostgreSQL, Temporal, an endpoint, the product's workers, the trainer.

All on free loopback ports, in a scratch folder, gone when the block ends. The trainer's processes are the only ones
that are killed; the product's supervisor starts them again.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pydantic import SecretStr
from temporalio.client import Client

from activities.ledger_activities import LedgerActivities
from activities.run_context import RunContexts
from benchmarks.exactly_once.batches import GROUPS, ROLLOUTS, write_dataset, write_model
from benchmarks.exactly_once.endpoint import Endpoint
from benchmarks.exactly_once.points import STEPS
from configs.load import dump_recipe
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from workers import generation_worker, rollout_worker
from workers.environments.paths import child_environment
from workers.stack.child import running
from workers.stack.ports import distinct_free_ports, free_port
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.restarts import RestartPolicy
from workers.stack.service import Launch, Service
from workers.stack.supervisor import Supervisor
from workers.stack.temporal import EmbeddedTemporal
from workers.temporal_client import connect
from workers.worker_process import Resources

QUEUE = "exactly-once"
TRAINER = "trainer-worker"  # as it names itself; importing its module takes long
HEARTBEAT_TIMEOUT_S = 2.5
READY_TIMEOUT_S = 240.0
RESTART_WAIT_S = 0.1
MODULE = "benchmarks.exactly_once.trainer"


@dataclass(frozen=True)
class Stack:
    """The servers, ready."""

    folder: Path
    recipe: Recipe
    ledger: Ledger
    blobs: BlobStore
    writing: LedgerActivities
    client: Client
    endpoint: Endpoint
    trainer: Supervisor

    def recipe_of(self, run_id: str) -> Recipe:
        """The recipe of one run."""
        return self.recipe.model_copy(update={"run": self.recipe.run.model_copy(update={"id": run_id})})

    def trainer_pid(self) -> int:
        """The process of rank 0, which polls."""
        return int((self.folder / "ready" / TRAINER).read_text())

    def kill_trainer(self) -> None:
        """SIGKILL to rank 0."""
        os.kill(self.trainer_pid(), signal.SIGKILL)


@asynccontextmanager
async def exactly_once_stack(folder: Path, ranks: int) -> AsyncIterator[Stack]:
    """Everything ready, the trainer polling."""
    async with AsyncExitStack() as closing:
        postgres = EmbeddedPostgres(folder, free_port())
        closing.callback(postgres.delete)
        await closing.enter_async_context(running(postgres.service(), folder / "postgres.log"))
        port, ui_port = distinct_free_ports(2)
        temporal = EmbeddedTemporal(port, ui_port, "default", timedelta(days=1), database=None)
        await closing.enter_async_context(running(temporal.service(), folder / "temporal.log"))
        endpoint = closing.enter_context(Endpoint())
        recipe = _recipe(folder, postgres.dsn, temporal.address, endpoint.url, ranks)
        write_model(recipe.run.model)
        write_dataset(recipe.run.dataset)
        await migrate(recipe.storage)
        file = folder / "recipe.yaml"
        file.write_text(dump_recipe(recipe, reveal_secrets=True))
        database = Database(recipe.storage)
        closing.push_async_callback(database.close)
        client = await connect(recipe.temporal)
        resources = Resources(client, recipe, database, closing)
        for worker in (*await rollout_worker.build(resources), *await generation_worker.build(resources)):
            await closing.enter_async_context(worker)
        trainer = Supervisor(
            [_trainer(file, ranks)],
            folder / "logs",
            policy=RestartPolicy(first_wait_s=RESTART_WAIT_S, longest_wait_s=RESTART_WAIT_S),
        )
        closing.push_async_callback(trainer.stop)
        await trainer.start()
        blobs = BlobStore(recipe.storage.blobs_url)
        ledger = Ledger(database, blobs)
        writing = LedgerActivities(ledger, blobs, RunContexts(ledger))
        yield Stack(folder, recipe, ledger, blobs, writing, client, endpoint, trainer)


def _recipe(folder: Path, dsn: str, temporal: str, endpoint: str, ranks: int) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"model": folder / "model", "dataset": folder / "rows.jsonl"},
            "grpo": {
                "num_prompts_per_step": GROUPS,
                "num_generations_per_prompt": ROLLOUTS,
                "max_num_steps": STEPS,
            },
            "training": {
                "output_dir": folder / "training",
                "data_parallel_size": ranks,
                "train_micro_batch_size": 2,
                "max_row_tokens": 1024,
                "lr": 1e-3,
                "weight_decay": 0.01,
                "save_period": 2,
                "threads": 1,
                "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
                "step_timeout_s": 300.0,
            },
            "generation": {"endpoints": [endpoint], "refit_timeout_s": 60.0},
            "gym": {"agents": {"agent": "http://127.0.0.1:1"}},
            "storage": StorageConfig(dsn=SecretStr(dsn), blobs_url=str(folder / "blobs")),
            "temporal": {"address": temporal, "task_queue": QUEUE},
        }
    )


def _trainer(recipe: Path, ranks: int) -> Service:
    sign = recipe.parent / "ready" / TRAINER
    launcher = ("-m", "workers.stack.torchrun", "--nproc-per-node", str(ranks), "-m", MODULE)

    async def launch() -> Launch:
        sign.unlink(missing_ok=True)
        variables = {**child_environment(), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return Launch((sys.executable, *launcher, "--recipe", str(recipe)), variables)

    async def ready() -> None:
        if not sign.exists():
            raise FileNotFoundError("the trainer does not poll yet")

    return Service(TRAINER, launch, ready, READY_TIMEOUT_S)
