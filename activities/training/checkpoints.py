"""The checkpoints of a run: recorded when they are complete, passed over when they are not any more, kept by policy.

A checkpoint only saves time: a step that is recorded is never lost, and one that cannot be saved is made up for later.
"""

import asyncio
import logging
import shutil
import time
from pathlib import Path

from activities.training.checkpoint_manifest import verify
from activities.training.errors import CheckpointError
from activities.training.job import Job, written
from activities.training.plan import checkpoint_due
from activities.training.retention import expendable_checkpoints
from activities.training.trainer import RankFailed, RankRefused, Trainer
from storage.weights import Weights

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in the ledger and the folders they name."""

    def __init__(self, weights: Weights, trainer: Trainer) -> None:
        self._weights = weights
        self._trainer = trainer

    async def usable(self, run_id: str) -> dict[int, Path]:
        """Folders by version, of those that are recorded and complete. The others are logged."""
        recorded = [(one.version, Path(one.path)) for one in await self._weights.checkpoints(run_id)]
        return await asyncio.to_thread(lambda: {version: path for version, path in recorded if _is_usable(path)})

    async def save_if_due(self, job: Job) -> float:
        """Save the engine's version, record it, and remove what is not kept; the seconds that it took, 0 if not due."""
        at, usable = self._trainer.at(job.run_id), await self.usable(job.run_id)
        if at is None or not checkpoint_due(at.version, usable, job.recipe.training.save_period):
            return 0.0
        started = time.monotonic()
        folder = job.new_checkpoint(at.version)
        try:
            await self._trainer.save(folder, job.deadline, job.say)
            await asyncio.to_thread(verify, folder, digests=False)
        except (RankFailed, RankRefused, CheckpointError) as error:
            logger.error("checkpoint %d of %s was not saved: %s", at.version, job.run_id, error)
            return time.monotonic() - started
        await self._record(job, at.version, folder)
        await self._prune(job, usable | {at.version: folder})
        return time.monotonic() - started

    async def _record(self, job: Job, version: int, folder: Path) -> None:
        """A record of the version that is there names a folder that was passed over: this one takes its place."""
        for stored in await self._weights.checkpoints(job.run_id):
            if stored.version == version and stored.path != str(folder):
                await self._weights.forget_checkpoint(job.lease, version)
                await _delete(Path(stored.path))
        await self._weights.record_checkpoint(job.lease, version, str(folder))

    async def _prune(self, job: Job, usable: dict[int, Path]) -> None:
        """Forget first, then delete. Folders of earlier trainers that nobody recorded go too."""
        training = job.recipe.training
        recorded = {one.version: Path(one.path) for one in await self._weights.checkpoints(job.run_id)}
        for version in expendable_checkpoints(recorded, usable, training.keep_last, training.keep_every):
            await self._weights.forget_checkpoint(job.lease, version)
            await _delete(recorded.pop(version))
        for name, (_, token) in written(job.checkpoints).items():
            if token < job.lease.token and job.checkpoints / name not in recorded.values():
                await _delete(job.checkpoints / name)


def _is_usable(folder: Path) -> bool:
    try:
        verify(folder, digests=False)
    except CheckpointError as error:
        logger.error("a checkpoint is passed over: %s", error)
        return False
    return True


async def _delete(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
