"""The engine's way to a policy version: from what it holds or the newest usable checkpoint, by applying stored batches.

Each batch leads from its version to the next, so however often this is interrupted, the weights are those of a run that
never was.
"""

import logging
import time

from activities.training.checkpoints import Checkpoints
from activities.training.job import Job
from activities.training.plan import KeepEngine, LoadCheckpoint, Route, plan_version
from activities.training.trainer import RankRefused, Trained, Trainer
from storage.blobs import BlobStore
from storage.ledger import Ledger

logger = logging.getLogger(__name__)


class CatchUp:
    """Moves the engine along the stored batches of a run."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, trainer: Trainer, checkpoints: Checkpoints) -> None:
        self._ledger = ledger
        self._blobs = blobs
        self._trainer = trainer
        self._checkpoints = checkpoints

    async def train(self, job: Job, step: int, digest: str, route: Route) -> Trained:
        """Take the route to the step's version, then apply the step."""
        replayed = await self.reach(job, step, route)
        job.say(f"step {step}: loading the batch")
        batch = await self._blobs.get(digest)
        started = time.monotonic()
        trained = await self._trainer.train(step, batch, digest, replayed, job.deadline, job.say)
        logger.info("%s step %d trained in %.1f s", job.run_id, step, time.monotonic() - started)
        return trained

    async def reach(self, job: Job, version: int, route: Route) -> int:
        """Bring the engine to `version`; the number of steps applied again. A checkpoint that the engine refuses is
        passed over."""
        usable = await self._checkpoints.usable(job.run_id) if isinstance(route.start, LoadCheckpoint) else {}
        while isinstance(route.start, LoadCheckpoint):
            saved = route.start.version
            try:
                folder = usable[saved]
                await self._trainer.load(job.run_id, job.settings, saved, folder, job.deadline, job.say)
                break
            except (KeyError, RankRefused) as error:  # KeyError: it became unusable since the route was planned
                logger.error("checkpoint %d of %s is passed over: %s", saved, job.run_id, error)
                usable.pop(saved, None)
                route = plan_version(version, version - 1, None, usable)
        else:
            if not isinstance(route.start, KeepEngine):
                await self._trainer.load(job.run_id, job.settings, 0, None, job.deadline, job.say)
        if route.replay:
            await self._apply_again(job, route.replay)
        return len(route.replay)

    async def _apply_again(self, job: Job, steps: tuple[int, ...]) -> None:
        logger.info("%s: steps %d..%d are applied again", job.run_id, steps[0], steps[-1])

        def say(text: str) -> None:
            job.say(f"applied again, {steps[0]} to {steps[-1]}: {text}")

        for record in await self._ledger.batches.range(job.run_id, steps[0], steps[-1]):
            say(f"step {record.step}: loading the batch")
            batch = await self._blobs.get(record.digest)
            await self._trainer.train(record.step, batch, record.digest, 0, job.deadline, say)
