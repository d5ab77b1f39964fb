"""Activities of the trainer queue: a step is applied exactly once, a version is exported as often as it is asked for.

The ledger says what was applied, the blob store has what it was applied with, the engine's memory and the checkpoints
only save time. So a trainer that dies anywhere goes on with the same weights as one that never died. The run is held by
one trainer for as long as an activity lasts, and every write checks that it still is.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from temporalio import activity

from activities.errors import surfaced
from activities.heartbeat import heartbeats
from activities.training.catch_up import CatchUp
from activities.training.checkpoints import Checkpoints
from activities.training.exports import Exports
from activities.training.job import Job
from activities.training.lease import TrainerReplaced, holding, new_holder
from activities.training.plan import Ledgered, ReturnApplied, Route, plan_step, plan_version
from activities.training.trainer import Trainer
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.ledger import Ledger
from storage.records import StepRecord
from workflows.messages import WeightsRef
from workflows.training_messages import PublishWeights, StepApplied, TrainStep

# The trainer is given up so long before the activity is, at most a fifth of its time: the failure has a class then.
_REPORT_S = 30.0


class TrainingActivities:
    """Steps and exports of any run, one at a time."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, trainer: Trainer) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._holder = new_holder()
        self._turn = asyncio.Lock()
        self._last_token: dict[str, int] = {}
        self._checkpoints = Checkpoints(ledger.weights, trainer)
        self._exports = Exports(ledger, trainer)
        self._catch_up = CatchUp(ledger, blobs, trainer, self._checkpoints)

    @activity.defn
    async def train_step(self, request: TrainStep) -> StepApplied:
        """Apply an optimizer step with its stored batch, or return the record of having done so."""
        with surfaced(boundary="trainer", run_id=request.run_id):
            async with self._job(request.run_id) as job:
                record = await self._apply(job, request.step, request.batch_digest)
                checkpoint_seconds = await self._checkpoints.save_if_due(job)
        return StepApplied(
            step=record.step,
            batch_digest=record.batch_digest,
            policy_version=record.step + 1,
            replayed_steps=record.replayed_steps,
            metrics=record.metrics,
            checkpoint_seconds=checkpoint_seconds,
        )

    @activity.defn
    async def publish_weights(self, request: PublishWeights) -> WeightsRef:
        """Export a policy version, or find its export unharmed."""
        with surfaced(boundary="trainer", run_id=request.run_id):
            async with self._job(request.run_id) as job:
                published = await self._exports.published(job.run_id, request.version)
                return published or await self._export(job, request.version)

    @asynccontextmanager
    async def _job(self, run_id: str) -> AsyncIterator[Job]:
        """The activity's turn, with the run in hand. What the engine holds of it counts for nothing once another
        trainer had the run."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with heartbeats() as beats, self._turn:
            recipe = Recipe.model_validate((await self._ledger.runs.get(run_id)).recipe)
            training = recipe.training
            deadline = begun + training.step_timeout_s - min(_REPORT_S, 0.2 * training.step_timeout_s)
            leases, silence_s = self._ledger.trainer_leases, training.heartbeat_timeout_s
            beats.say("waits for the command under way")
            await self._trainer.idle()
            try:
                async with holding(leases, run_id, self._holder, silence_s, beats.say) as lease:
                    if lease.token != self._last_token.get(run_id, 0) + 1:
                        self._trainer.forget(run_id)
                    self._last_token[run_id] = lease.token
                    yield Job(recipe, lease, deadline, beats.say)
            except TrainerReplaced:
                self._trainer.forget(run_id)
                raise

    async def _apply(self, job: Job, step: int, digest: str) -> StepRecord:
        applied = await self._ledger.steps.get(job.run_id, step)
        stored = await self._ledger.batches.get(job.run_id, step)
        view = Ledgered(
            stored_digest=None if stored is None else stored.digest,
            applied_digest=None if applied is None else applied.batch_digest,
            last_applied=await self._ledger.steps.last_applied(job.run_id),
        )
        usable = await self._checkpoints.usable(job.run_id)
        plan = plan_step(step, digest, view, self._trainer.at(job.run_id), usable)
        if isinstance(plan, ReturnApplied):
            assert applied is not None
            return applied
        trained = self._trainer.trained
        if isinstance(plan, Route):
            trained = await self._catch_up.train(job, step, digest, plan)
        assert trained is not None
        job.say(f"step {step}: recording it")
        return await self._ledger.steps.apply(
            job.lease, step, digest, trained.metrics, replayed_steps=trained.replayed_steps
        )

    async def _export(self, job: Job, version: int) -> WeightsRef:
        last_applied = await self._ledger.steps.last_applied(job.run_id)
        usable = await self._checkpoints.usable(job.run_id)
        route = plan_version(version, last_applied, self._trainer.at(job.run_id), usable)
        await self._catch_up.reach(job, version, route)
        return await self._exports.publish(job, version)
