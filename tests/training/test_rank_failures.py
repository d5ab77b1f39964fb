"""Two ranks under torchrun: one that fails ends the attempt in time, the group starts again, and no bit differs."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import SecretStr
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import RetryPolicy
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.training.batch import TrainingBatch
from configs.load import dump_recipe
from configs.recipe import Recipe
from configs.temporal import TemporalConfig
from tests.training.failing_worker import FAULTS
from tests.training.samples import make_batch
from tests.training.trainer_site import Site, new_site
from workers.environments.paths import child_environment
from workers.temporal_client import connect
from workflows.messages import WeightsRef
from workflows.training_messages import PublishWeights, StepApplied, TrainStep

pytestmark = pytest.mark.integration

PATIENCE_S = 240.0
HANG_S = 8.0
SILENCE_S = 5.0
RETRY = RetryPolicy(initial_interval=timedelta(seconds=2), backoff_coefficient=1.0, maximum_attempts=10)


@workflow.defn
class Trained:
    """Ask the trainer queue for a step and for the version that it leads to."""

    @workflow.run
    async def run(self, request: TrainStep) -> tuple[StepApplied, WeightsRef]:
        applied = await workflow.execute_activity(
            "train_step",
            request,
            result_type=StepApplied,
            task_queue="trained-trainer",
            start_to_close_timeout=timedelta(seconds=PATIENCE_S),
            heartbeat_timeout=timedelta(seconds=SILENCE_S),
            retry_policy=RETRY,
        )
        published = await workflow.execute_activity(
            "publish_weights",
            PublishWeights(run_id=request.run_id, version=applied.policy_version),
            result_type=WeightsRef,
            task_queue="trained-trainer",
            start_to_close_timeout=timedelta(seconds=PATIENCE_S),
            heartbeat_timeout=timedelta(seconds=SILENCE_S),
            retry_policy=RETRY,
        )
        return applied, published


@dataclass
class Group:
    """A torchrun of two ranks and what it may be told."""

    site: Site
    client: Client
    process: asyncio.subprocess.Process
    folder: Path

    def tell(self, rank: int, fault: str) -> None:
        """Have a rank die or hang in its next gradient pass."""
        (self.folder / str(rank)).write_text(fault)

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return int((self.folder / f"pid-{rank}").read_text())

    @property
    def log(self) -> str:
        """What the ranks said."""
        return (self.folder / "trainer.log").read_text()

    async def ask(self, step: int, batch: TrainingBatch | None = None) -> tuple[StepApplied, WeightsRef]:
        """The step's record and the weights after it."""
        digest = await self.site.store(batch or make_batch(step))
        request = TrainStep(run_id=self.site.run_id, step=step, batch_digest=digest)
        name = f"{self.site.run_id}-{step}"
        async with asyncio.timeout(PATIENCE_S):
            return await self.client.execute_workflow(Trained.run, request, id=name, task_queue="test")

    async def hang(self, rank: int, step: int) -> tuple[StepApplied, WeightsRef]:
        """The step, in whose first try a rank hangs. Only that try is short of time."""
        await self._give_steps(HANG_S)
        self.tell(rank, "hang")
        asked = asyncio.create_task(self.ask(step))
        hangs = f"The trainer hangs in step {step} (gradient, micro-batch 2 of 4) and is started again"
        async with asyncio.timeout(PATIENCE_S):
            while hangs not in self.log:
                assert not asked.done(), self.log[-3000:]
                await asyncio.sleep(0.1)
        await self._give_steps(PATIENCE_S)
        return await asked

    async def _give_steps(self, seconds: float) -> None:
        """From the next try on, a step of the run may take so long."""
        runs, run_id = self.site.ledger.runs, self.site.run_id
        recipe = (await runs.get(run_id)).recipe
        training = Recipe.model_validate(recipe).training.model_copy(update={"step_timeout_s": seconds})
        await runs.change_recipe(run_id, recipe | {"training": training.model_dump(mode="json")})

    async def restarted(self, before: tuple[int, int]) -> None:
        """Return when both ranks are other processes."""
        async with asyncio.timeout(PATIENCE_S):
            while self.pid(0) == before[0] or self.pid(1) == before[1]:
                assert self.process.returncode is None, self.log[-3000:]
                await asyncio.sleep(0.1)

    @property
    def pids(self) -> tuple[int, int]:
        """The processes of both ranks."""
        return self.pid(0), self.pid(1)


@pytest.fixture
async def site(migrated_dsn: str, temporal_address: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with new_site(migrated_dsn, tmp_path) as made:
        training = {
            "data_parallel_size": 2,
            "train_micro_batch_size": 1,
            "save_period": 1,
            "step_timeout_s": PATIENCE_S,
            "heartbeat_timeout_s": SILENCE_S,
        }
        made.recipe = made.recipe.model_copy(
            update={
                "training": made.recipe.training.model_copy(update=training),
                "temporal": TemporalConfig(address=temporal_address, task_queue="trained"),
                "storage": made.recipe.storage.model_copy(update={"dsn": SecretStr(migrated_dsn)}),
            }
        )
        yield made


@asynccontextmanager
async def two_ranks(site: Site, folder: Path) -> AsyncIterator[Group]:
    """The worker under torchrun, and a worker for the workflow that asks it."""
    file = folder / "recipe.yaml"
    file.write_text(dump_recipe(site.recipe, reveal_secrets=True))
    client = await connect(site.recipe.temporal)
    with (folder / "trainer.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers.stack.torchrun", "--nproc-per-node", "2", "--max-restarts", "9"),
            *("-m", "tests.training.failing_worker", "--recipe", str(file)),
            env={**os.environ, **child_environment(), "OMP_NUM_THREADS": "1", FAULTS: str(folder)},
            stdout=log,
            stderr=log,
        )
    group = Group(site, client, process, folder)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (folder / "ready" / "trainer-worker").exists():
                assert process.returncode is None, group.log[-3000:]
                await asyncio.sleep(0.2)
        runner = UnsandboxedWorkflowRunner()
        async with Worker(client, task_queue="test", workflows=[Trained], workflow_runner=runner):
            yield group
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            for rank in range(2):  # they are not torchrun's children for it to take along
                with suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(group.pid(rank), signal.SIGKILL)


async def test_ranks_that_fail_are_started_again_and_train_the_same_bits(site: Site, tmp_path: Path) -> None:
    async with two_ranks(site, tmp_path) as group:
        await site.start_run("quiet")
        quiet = [await group.ask(step) for step in range(4)]
        assert [applied.replayed_steps for applied, _ in quiet] == [0] * 4

        await site.start_run("disturbed")
        disturbed = [await group.ask(0)]
        before = group.pids
        disturbed.append(await group.hang(rank=1, step=1))
        await group.restarted(before)
        before = group.pids
        group.tell(0, "die")
        disturbed.append(await group.ask(2))
        await group.restarted(before)
        before = group.pids
        os.kill(before[1], signal.SIGKILL)  # between two commands
        await group.restarted(before)
        disturbed.append(await group.ask(3))

        assert [weights.digest for _, weights in disturbed] == [weights.digest for _, weights in quiet]
        assert [applied.replayed_steps for applied, _ in disturbed] == [0] * 4  # each version has a checkpoint
        assert "rank 1 lost rank 0" in group.log

        with pytest.raises(WorkflowFailureError) as refused:
            await group.ask(4, TrainingBatch("run", 4, ()))
        assert "Train failed on 2 of 2 ranks: ranks 0, 1: EmptyBatch" in str(refused.value.cause.__cause__)

        group.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await group.process.wait()
        assert not (tmp_path / "ready" / "trainer-worker").exists()
