"""Activities of the trainer queue: a step is applied exactly once, a version is exported as often as it is asked for.

The ledger says what was applied, the blob store has what it was applied with, the engine's memory and the checkpoints
only save time. So a trainer that dies anywhere goes on with the same weights as one that never died.
"""

import asyncio
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from temporalio import activity

from activities.errors import surfaced
from activities.generation.errors import WeightsMissing
from activities.generation.weights import verify_weights, weights_digest, weights_label
from activities.heartbeat import heartbeats
from activities.training.commands import Settings
from activities.training.plan import (
    KeepEngine,
    Ledgered,
    LoadCheckpoint,
    ReturnApplied,
    Route,
    checkpoint_due,
    plan_step,
    plan_version,
)
from activities.training.trainer import RankFailed, RankRefused, Trained, Trainer
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.errors import VersionConflict
from storage.ledger import Ledger
from storage.records import StepRecord
from workflows.messages import PublishWeights, StepApplied, TrainStep, WeightsRef

# The trainer is given up so long before the activity is, at most a tenth of its time: the failure has a class then.
_REPORT_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """One activity's view of its run, and the moment at which the trainer is given up."""

    run_id: str
    recipe: Recipe
    deadline: float

    @property
    def folder(self) -> Path:
        return self.recipe.training.output_dir.resolve() / self.run_id

    def checkpoint(self, version: int) -> Path:
        return self.folder / "checkpoints" / f"version-{version}"

    def weights(self, version: int) -> Path:
        return self.folder / "weights" / weights_label(version)

    @property
    def settings(self) -> Settings:
        recipe = self.recipe
        return Settings(recipe.training, recipe.grpo.loss_fn, recipe.grpo.seed, recipe.run.model.resolve())


class TrainingActivities:
    """Steps and exports of any run, one at a time."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, trainer: Trainer) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._trainer = trainer

    @activity.defn
    async def train_step(self, request: TrainStep) -> StepApplied:
        """Apply an optimizer step with its stored batch, or return the record of having done so."""
        with surfaced(boundary="trainer", run_id=request.run_id):
            async with heartbeats():
                job = await self._job(request.run_id)
                record = await self._apply(job, request.step, request.batch_digest)
                await self._save_checkpoint(job)
        return StepApplied(
            step=record.step,
            batch_digest=record.batch_digest,
            policy_version=record.step + 1,
            replayed_steps=record.replayed_steps,
            metrics=record.metrics,
        )

    @activity.defn
    async def publish_weights(self, request: PublishWeights) -> WeightsRef:
        """Export a policy version, or find its export unharmed."""
        with surfaced(boundary="trainer", run_id=request.run_id):
            async with heartbeats():
                job = await self._job(request.run_id)
                published = await self._published(job, request.version)
                return published or await self._export(job, request.version)

    async def _job(self, run_id: str) -> _Job:
        run = await self._ledger.runs.get(run_id)
        recipe = Recipe.model_validate(run.recipe)
        timeout_s = recipe.training.step_timeout_s
        limit_s = timeout_s - min(_REPORT_S, 0.1 * timeout_s)
        return _Job(run_id, recipe, asyncio.get_running_loop().time() + limit_s)

    async def _apply(self, job: _Job, step: int, digest: str) -> StepRecord:
        applied = await self._ledger.steps.get(job.run_id, step)
        stored = await self._ledger.batches.get(job.run_id, step)
        view = Ledgered(
            stored_digest=None if stored is None else stored.digest,
            applied_digest=None if applied is None else applied.batch_digest,
            last_applied=await self._ledger.steps.last_applied(job.run_id),
        )
        plan = plan_step(step, digest, view, self._trainer.at(job.run_id), await self._checkpoints(job))
        if isinstance(plan, ReturnApplied):
            assert applied is not None
            return applied
        trained = self._trainer.trained
        if isinstance(plan, Route):
            trained = await self._train(job, step, digest, plan)
        assert trained is not None
        return await self._ledger.steps.apply(
            job.run_id, step, digest, trained.metrics, replayed_steps=trained.replayed_steps
        )

    async def _train(self, job: _Job, step: int, digest: str, route: Route) -> Trained:
        replayed = await self._travel(job, step, route)
        batch = await self._blobs.get(digest)
        started = time.monotonic()
        trained = await self._trainer.train(step, batch, digest, replayed, job.deadline)
        logger.info("%s step %d trained in %.1f s", job.run_id, step, time.monotonic() - started)
        return trained

    async def _travel(self, job: _Job, version: int, route: Route) -> int:
        """Bring the engine to `version`; the number of steps applied again. An unreadable checkpoint is passed over."""
        usable = set(await self._checkpoints(job))
        while isinstance(route.start, LoadCheckpoint):
            saved = route.start.version
            try:
                await self._trainer.load(job.run_id, job.settings, saved, job.checkpoint(saved), job.deadline)
                break
            except (RankFailed, RankRefused) as error:
                logger.error("checkpoint %d of %s is passed over: %s", saved, job.run_id, error)
                usable.discard(saved)
                route = plan_version(version, version - 1, None, usable)
        else:
            if not isinstance(route.start, KeepEngine):
                await self._trainer.load(job.run_id, job.settings, 0, None, job.deadline)
        if route.replay:
            logger.info("%s: steps %d..%d are applied again", job.run_id, route.replay[0], route.replay[-1])
            records = await self._ledger.batches.range(job.run_id, route.replay[0], route.replay[-1])
            for record in records:
                batch = await self._blobs.get(record.digest)
                await self._trainer.train(record.step, batch, record.digest, 0, job.deadline)
        return len(route.replay)

    async def _checkpoints(self, job: _Job) -> list[int]:
        """Versions with a checkpoint that is recorded and still there."""
        recorded = await self._ledger.weights.checkpoints(job.run_id)
        return [record.version for record in recorded if Path(record.path).is_dir()]

    async def _save_checkpoint(self, job: _Job) -> None:
        """Save when it is due. The step is recorded already, so a failure costs replays later and not the step."""
        at, checkpoints = self._trainer.at(job.run_id), await self._checkpoints(job)
        if at is None or not checkpoint_due(at.version, checkpoints, job.recipe.training.save_period):
            return
        folder = job.checkpoint(at.version)
        try:
            await self._trainer.save(folder, job.deadline)
        except (RankFailed, RankRefused) as error:
            logger.error("checkpoint %d of %s was not saved: %s", at.version, job.run_id, error)
            return
        await self._ledger.weights.record_checkpoint(job.run_id, at.version, str(folder))
        for version in sorted([*checkpoints, at.version])[: -job.recipe.training.keep_checkpoints]:
            await self._ledger.weights.forget_checkpoint(job.run_id, version)
            await _delete(job.checkpoint(version))

    async def _published(self, job: _Job, version: int) -> WeightsRef | None:
        record = await self._ledger.weights.get(job.run_id, version)
        if record is None:
            return None
        ref = WeightsRef(version=version, path=record.path, digest=record.digest)
        try:
            await asyncio.to_thread(verify_weights, ref)
        except WeightsMissing as error:
            logger.warning("policy-%d of %s is exported again: %s", version, job.run_id, error)
            return None
        return ref

    async def _export(self, job: _Job, version: int) -> WeightsRef:
        last_applied = await self._ledger.steps.last_applied(job.run_id)
        at, checkpoints = self._trainer.at(job.run_id), await self._checkpoints(job)
        await self._travel(job, version, plan_version(version, last_applied, at, checkpoints))
        folder = job.weights(version)
        await self._trainer.export(folder, job.deadline)
        digest = await asyncio.to_thread(weights_digest, folder)
        try:
            await self._ledger.weights.publish(job.run_id, version, str(folder), digest)
        except VersionConflict as error:  # only where steps are not bit-identical when applied again
            logger.warning("policy-%d of %s was rebuilt with other bits: %s", version, job.run_id, error)
            await self._ledger.weights.replace(job.run_id, version, str(folder), digest)
        await self._prune_weights(job, version)
        return WeightsRef(version=version, path=str(folder), digest=digest)

    async def _prune_weights(self, job: _Job, version: int) -> None:
        exported = {
            int(folder.name.rpartition("-")[2]): folder for folder in job.weights(0).parent.glob("policy-[0-9]*")
        }
        for old in sorted(exported)[: -job.recipe.training.keep_weights]:
            if old != version:
                await _delete(exported[old])


async def _delete(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
