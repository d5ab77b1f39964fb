"""The trainer's activities with the real engine, ledger and blob store: exactly once, through deaths and refusals."""

import asyncio
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio import workflow
from temporalio.client import WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.batch import TrainingBatch
from activities.training.ranks import Ranks
from activities.training.trainer import Trainer
from activities.training_activities import TrainingActivities
from configs.load import dump_recipe
from configs.recipe import Recipe
from configs.storage import StorageConfig
from configs.temporal import TemporalConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.migrate import migrate
from tests.storage.building import Story
from tests.training.samples import make_batch, write_model
from workers.environments.paths import child_environment
from workers.temporal_client import connect
from workflows.messages import PublishWeights, StepApplied, TrainStep, WeightsRef

pytestmark = pytest.mark.integration

START_TIMEOUT_S = 120.0


@dataclass
class Site:
    """One run with its recipe, ledger and blobs, and the trainer that serves it at the moment."""

    recipe: Recipe
    ledger: Ledger
    blobs: BlobStore
    run_id: str = "run"

    def __post_init__(self) -> None:
        self.restart_trainer()

    def restart_trainer(self) -> None:
        """What a killed process leaves behind is nothing: a new engine, a new view."""

        def give_up(cause: str) -> None:
            raise AssertionError(f"the trainer must not give up: {cause}")

        self.trainer = Trainer(Ranks(), give_up)
        self.activities = TrainingActivities(self.ledger, self.blobs, self.trainer)

    async def start_run(self, run_id: str) -> None:
        self.run_id = run_id
        recipe = self.recipe.model_dump(mode="json")
        await self.ledger.runs.create(run_id, f"queue-{run_id}", recipe, "d" * 64, 10, "m" * 64)

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
        digest = await self.store(make_batch(step))
        return await self.ask_step(step, digest)

    async def ask_step(self, step: int, digest: str) -> StepApplied:
        request = TrainStep(run_id=self.run_id, step=step, batch_digest=digest)
        return await ActivityEnvironment().run(self.activities.train_step, request)

    async def publish(self, version: int) -> WeightsRef:
        request = PublishWeights(run_id=self.run_id, version=version)
        return await ActivityEnvironment().run(self.activities.publish_weights, request)


@pytest.fixture
async def site(database_dsn: str, tmp_path: Path) -> AsyncIterator[Site]:
    storage = StorageConfig(dsn=SecretStr(database_dsn), blobs_url=str(tmp_path / "blobs"))
    await migrate(storage)
    database = Database(storage)
    recipe = Recipe.model_validate(
        {
            "run": {
                "model": str(write_model(tmp_path / "model", "qwen3-tied")),
                "dataset": str(tmp_path / "rows.jsonl"),
            },
            "training": {
                "output_dir": str(tmp_path / "training"),
                "save_period": 2,
                "keep_checkpoints": 1,
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


async def test_a_trainer_killed_at_any_moment_ends_with_the_same_bits(site: Site) -> None:
    await site.start_run("undisturbed")
    for step in range(5):
        await site.train(step)
    undisturbed = await site.publish(5)

    await site.start_run("disturbed")
    await site.train(0)
    site.restart_trainer()  # no checkpoint yet
    assert (await site.train(1)).replayed_steps == 1
    await site.train(2)
    site.restart_trainer()  # the checkpoint of version 2 is one step behind
    assert (await site.train(3)).replayed_steps == 1
    digest = await site.store(make_batch(4))
    await site.trainer.train(4, make_batch(4).to_bytes(), digest, 0, asyncio.get_running_loop().time() + 60)
    site.restart_trainer()  # between training and recording
    assert (await site.ask_step(4, digest)).replayed_steps == 0  # version 4 has a checkpoint
    site.restart_trainer()  # between recording and publishing
    assert (await site.publish(5)).digest == undisturbed.digest


async def test_an_unreadable_checkpoint_is_passed_over(site: Site) -> None:
    await site.start_run("run")
    for step in range(3):
        await site.train(step)
    published = await site.publish(3)
    for file in (site.recipe.training.output_dir / "run" / "checkpoints" / "version-2").iterdir():
        file.unlink()
    shutil.rmtree(published.path)
    site.restart_trainer()
    assert await site.publish(3) == published


async def test_asking_for_a_step_again_returns_its_record_and_trains_nothing(site: Site) -> None:
    await site.start_run("run")
    first = await site.train(0)
    again = await site.ask_step(0, first.batch_digest)
    assert again == first
    assert first.metrics["loss"] != 0
    at = site.trainer.at("run")
    assert at is not None
    assert at.version == 1


async def test_another_batch_for_a_step_is_refused_for_good(site: Site) -> None:
    await site.start_run("run")
    await site.train(0)
    with pytest.raises(ApplicationError, match="is refused, because a step is applied once") as refused:
        await site.ask_step(0, hashlib.sha256(b"another").hexdigest())
    assert refused.value.non_retryable


async def test_a_batch_the_engine_refuses_names_the_rank_and_changes_nothing(site: Site) -> None:
    await site.start_run("run")
    await site.train(0)
    before = await site.publish(1)
    empty = await site.store(TrainingBatch("run", 1, ()))
    with pytest.raises(ApplicationError, match="Train failed on 1 of 1 ranks: rank 0: EmptyBatch") as refused:
        await site.ask_step(1, empty)
    assert refused.value.non_retryable
    assert site.trainer.at("run") is None
    shutil.rmtree(before.path)
    assert await site.publish(1) == before


async def test_a_step_whose_record_was_not_written_is_recorded_without_training_again(site: Site) -> None:
    await site.start_run("run")
    digest = await site.store(make_batch(0))
    group = await site.ledger.groups.get("run/step-0/group-0")
    assert group.state == "sealed"
    deadline = asyncio.get_running_loop().time() + 60
    settings_step = await site.publish(0)  # loads the run
    assert settings_step.version == 0
    trained = await site.trainer.train(0, make_batch(0).to_bytes(), digest, 0, deadline)
    applied = await site.ask_step(0, digest)
    assert applied.metrics == trained.metrics
    at = site.trainer.at("run")
    assert at is not None
    assert at.version == 1


async def test_two_runs_take_turns_on_one_trainer(site: Site) -> None:
    await site.start_run("first")
    await site.train(0)
    await site.start_run("second")
    await site.train(0)
    second = await site.publish(1)
    site.run_id = "first"
    assert (await site.train(1)).replayed_steps == 1
    site.run_id = "second"
    site.restart_trainer()
    shutil.rmtree(second.path)
    assert (await site.publish(1)).digest == second.digest


async def test_only_the_newest_checkpoints_and_weights_are_kept(site: Site) -> None:
    await site.start_run("run")
    for step in range(5):
        await site.train(step)
        await site.publish(step + 1)
    folder = site.recipe.training.output_dir / "run"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["version-4"]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["policy-4", "policy-5"]
    assert [record.version for record in await site.ledger.weights.checkpoints("run")] == [4]


@workflow.defn
class OneStep:
    """Ask the trainer queue for one step, with one try."""

    @workflow.run
    async def run(self, request: TrainStep) -> StepApplied:
        return await workflow.execute_activity(
            "train_step",
            request,
            result_type=StepApplied,
            task_queue="trained-trainer",
            start_to_close_timeout=timedelta(seconds=120),
            heartbeat_timeout=timedelta(seconds=30),
            retry_policy=RetryPolicy(maximum_attempts=1),
        )


async def test_two_ranks_under_torchrun_train_a_step_refuse_a_bad_one_and_stop(
    site: Site, database_dsn: str, temporal_address: str, tmp_path: Path
) -> None:
    training = site.recipe.training.model_copy(update={"data_parallel_size": 2})
    site.recipe = site.recipe.model_copy(
        update={
            "training": training,
            "temporal": TemporalConfig(address=temporal_address, task_queue="trained"),
            "storage": site.recipe.storage.model_copy(update={"dsn": SecretStr(database_dsn)}),
        }
    )
    await site.start_run("run")
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(site.recipe, reveal_secrets=True))
    client = await connect(site.recipe.temporal)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "trainer.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *torchrun,
            *("-m", "workers.trainer_worker", "--recipe", str(file)),
            env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not (tmp_path / "ready" / "trainer-worker").exists():
                assert process.returncode is None, (tmp_path / "trainer.log").read_text()[-2000:]
                await asyncio.sleep(0.2)
        runner = UnsandboxedWorkflowRunner()
        async with Worker(client, task_queue="test", workflows=[OneStep], workflow_runner=runner):

            async def ask(step: int, batch: TrainingBatch) -> StepApplied:
                request = TrainStep(run_id="run", step=step, batch_digest=await site.store(batch))
                return await client.execute_workflow(OneStep.run, request, id=f"step-{step}", task_queue="test")

            applied = await ask(0, make_batch(0))
            assert applied.policy_version == 1
            assert applied.metrics["loss"] != 0
            with pytest.raises(WorkflowFailureError) as refused:
                await ask(1, TrainingBatch("run", 1, ()))
            assert "failed on 2 of 2 ranks" in str(refused.value.cause.__cause__)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.wait()
        assert not (tmp_path / "ready" / "trainer-worker").exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
