"""The exported weights of a run: found unharmed, or written again; a version is published under the trainer's lease."""

import asyncio
import logging
import shutil

from activities.generation.errors import WeightsMissing
from activities.generation.weights import verify_weights, weights_digest
from activities.training.job import Job, written
from activities.training.retention import expendable_weights
from activities.training.trainer import Trainer
from storage.errors import VersionConflict
from storage.ledger import Ledger
from workflows.messages import WeightsRef

logger = logging.getLogger(__name__)


class Exports:
    """What generation loads."""

    def __init__(self, ledger: Ledger, trainer: Trainer) -> None:
        self._ledger = ledger
        self._trainer = trainer

    async def published(self, run_id: str, version: int) -> WeightsRef | None:
        """The weights of a version, if they are published and their files are what the record says."""
        record = await self._ledger.weights.get(run_id, version)
        if record is None:
            return None
        ref = WeightsRef(version=version, path=record.path, digest=record.digest)
        try:
            await asyncio.to_thread(verify_weights, ref)
        except WeightsMissing as error:
            logger.warning("policy-%d of %s is exported again: %s", version, run_id, error)
            return None
        return ref

    async def publish(self, job: Job, version: int) -> WeightsRef:
        """Write the weights of the engine's version and publish them; then remove what is not kept."""
        folder = job.new_weights(version)
        await self._trainer.export(folder, job.deadline, job.say)
        digest = await asyncio.to_thread(weights_digest, folder)
        try:
            await self._ledger.weights.publish(job.lease, version, str(folder), digest)
        except VersionConflict as error:  # only where steps are not bit-identical when applied again
            logger.warning("policy-%d of %s was rebuilt with other bits: %s", version, job.run_id, error)
            await self._ledger.weights.replace(job.lease, version, str(folder), digest)
        await self._prune(job, folder.name)
        return WeightsRef(version=version, path=str(folder), digest=digest)

    async def _prune(self, job: Job, current: str) -> None:
        expendable = expendable_weights(written(job.weights), current, job.recipe.training.keep_weights)
        if expendable:
            await self._ledger.trainer_leases.check(job.lease)
        for name in expendable:
            await asyncio.to_thread(shutil.rmtree, job.weights / name, ignore_errors=True)
