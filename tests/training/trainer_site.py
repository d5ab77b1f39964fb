"""One run with its ledger and blobs, and trainers that come and go: what the trainer's tests play with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from temporalio.testing import ActivityEnvironment

from activities.training.batch import TrainingBatch
from activities.training.ranks import Ranks
from activities.training.trainer import Trainer
from activities.training_activities import TrainingActivities
from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.storage.building import Story
from tests.training.samples import make_batch, write_model
from workflows.messages import WeightsRef
from workflows.training_messages import PublishWeights, StepApplied, TrainStep


def give_up(cause: str) -> None:
    """In these tests no trainer hangs."""
    raise AssertionError(f"the trainer must not give up: {cause}")


@dataclass
class Site:
    """One run with its recipe, ledger and blobs, and the trainer that serves it at the moment."""

    recipe: Recipe
    ledger: Ledger
    blobs: BlobStore
    run_id: str = "run"
    said: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.restart_trainer()

    def restart_trainer(self) -> None:
        """What a killed process leaves behind is nothing: a new engine, a new view."""
        self.trainer = Trainer(Ranks(), give_up)
        self.activities = TrainingActivities(self.ledger, self.blobs, self.trainer)

    async def start_run(self, run_id: str, **training: Any) -> None:
        """A run of the recipe, with other values of `training`."""
        self.run_id = run_id
        recipe = self.recipe.model_dump(mode="json")
        recipe["training"] |= training
        await self.ledger.runs.create(run_id, f"queue-{run_id}", recipe, "d" * 64, 10, "m" * 64)

    @property
    def folder(self) -> Path:
        """Where the run's files are."""
        return self.recipe.training.output_dir / self.run_id

    async def checkpoint(self, version: int) -> Path:
        """The recorded folder of a checkpoint."""
        recorded = await self.ledger.weights.checkpoints(self.run_id)
        return next(Path(one.path) for one in recorded if one.version == version)

    async def store(self, batch: TrainingBatch) -> str:
        """Seal a group and store its batch; the digest."""
        group = await Story(self.ledger, self.run_id).sealed_group([1.0, 0.0], batch.step)
        digest = await self.blobs.put(batch.to_bytes())
        rows, rollouts, tokens = len(batch.rows), batch.rollouts, batch.trained_tokens
        await self.ledger.batches.store(
            self.run_id, batch.step, digest, rows, rollouts, tokens, 2, 0.5, [group.group_id]
        )
        return digest

    async def train(self, step: int) -> StepApplied:
        """Store the step's batch and have it applied."""
        return await self.ask_step(step, await self.store(make_batch(step)))

    async def ask_step(self, step: int, digest: str) -> StepApplied:
        """Have a step applied."""
        request = TrainStep(run_id=self.run_id, step=step, batch_digest=digest)
        return await self.environment().run(self.activities.train_step, request)

    async def publish(self, version: int) -> WeightsRef:
        """Have a version exported."""
        request = PublishWeights(run_id=self.run_id, version=version)
        return await self.environment().run(self.activities.publish_weights, request)

    def environment(self) -> ActivityEnvironment:
        """An activity's surroundings; its heartbeats are kept in `said`."""
        environment = ActivityEnvironment()
        environment.on_heartbeat = lambda *details: self.said.extend(str(one) for one in details)
        return environment


@asynccontextmanager
async def new_site(migrated_dsn: str, folder: Path) -> AsyncIterator[Site]:
    """A site in a ledger without rows."""
    storage = StorageConfig(dsn=SecretStr(migrated_dsn), blobs_url=str(folder / "blobs"))
    database = Database(storage)
    recipe = Recipe.model_validate(
        {
            "run": {"model": str(write_model(folder / "model", "qwen3-tied")), "dataset": str(folder / "rows.jsonl")},
            "training": {
                "output_dir": str(folder / "training"),
                "save_period": 2,
                "keep_last": 1,
                "lr": 1e-2,
                "train_micro_batch_size": 2,
                "threads": 1,
            },
            "storage": {"blobs_url": storage.blobs_url},
        }
    )
    blobs = BlobStore(storage.blobs_url)
    yield Site(recipe, Ledger(database, blobs), blobs)
    await database.close()
