"""Policy versions: exported weights, the endpoints that loaded them, the trainer's checkpoints.

A version is published once; the digest says what it is, so publishing other weights under its number is refused. What a
trainer writes here it writes under its lease: TrainerFenced refuses it once another trainer holds the run.
"""

from datetime import datetime

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import UnknownVersion, VersionConflict
from storage.models.weights import Checkpoint, PolicyVersion, Refit
from storage.records import Record
from storage.trainer_leases import TrainerLease, check_lease


class WeightsRecord(Record):
    """Exported weights of a policy version."""

    run_id: str
    version: int
    path: str
    digest: str
    published_at: datetime


class RefitRecord(Record):
    """An endpoint that loaded a policy version."""

    run_id: str
    version: int
    endpoint: str
    seconds: float
    refitted_at: datetime


class CheckpointRecord(Record):
    """A trainer checkpoint that holds policy version `version`."""

    run_id: str
    version: int
    path: str
    saved_at: datetime


class Weights:
    """Publish, refit, checkpoint."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def publish(self, lease: TrainerLease, version: int, path: str, digest: str) -> WeightsRecord:
        """Write where a version's weights are. Raises VersionConflict when the version has other weights."""
        new_version = insert(PolicyVersion).values(run_id=lease.run_id, version=version, path=path, digest=digest)
        # The same weights in another folder: they were exported again, by a later trainer or elsewhere.
        moved = update(PolicyVersion).where(*_is(PolicyVersion, lease.run_id, version), PolicyVersion.digest == digest)
        async with self._database.transaction() as session:
            await check_lease(session, lease)
            await session.execute(new_version.on_conflict_do_nothing())
            await session.execute(moved.values(path=path).execution_options(synchronize_session=False))
            stored = WeightsRecord.model_validate(await session.get_one(PolicyVersion, (lease.run_id, version)))
        if stored.digest != digest:
            raise VersionConflict(lease.run_id, version, "weights digest", stored.digest, digest)
        return stored

    async def replace(self, lease: TrainerLease, version: int, path: str, digest: str) -> None:
        """Write what a version's weights are now: the first export is gone, and the second has other bits."""
        this = update(PolicyVersion).where(*_is(PolicyVersion, lease.run_id, version))
        async with self._database.transaction() as session:
            await check_lease(session, lease)
            await session.execute(this.values(path=path, digest=digest))

    async def get(self, run_id: str, version: int) -> WeightsRecord | None:
        """The weights of a version, if they are published."""
        async with self._database.transaction() as session:
            stored = await session.get(PolicyVersion, (run_id, version))
        return None if stored is None else WeightsRecord.model_validate(stored)

    async def newest(self, run_id: str) -> WeightsRecord | None:
        """The weights of the newest version that is published, if one is."""
        newest = (
            select(PolicyVersion).where(PolicyVersion.run_id == run_id).order_by(PolicyVersion.version.desc()).limit(1)
        )
        async with self._database.transaction() as session:
            stored = await session.scalar(newest)
        return None if stored is None else WeightsRecord.model_validate(stored)

    async def record_refit(self, run_id: str, version: int, endpoint: str, seconds: float) -> RefitRecord:
        """Write that an endpoint answers with a version; a repeated refit keeps the first record."""
        new_refit = insert(Refit).values(run_id=run_id, version=version, endpoint=endpoint, seconds=seconds)
        try:
            async with self._database.transaction() as session:
                await session.execute(new_refit.on_conflict_do_nothing())
                return RefitRecord.model_validate(await session.get_one(Refit, (run_id, version, endpoint)))
        except IntegrityError as error:
            if broken_constraint(error) == "refits_run_id_version_fkey":
                raise UnknownVersion(run_id, version) from None
            raise

    async def record_checkpoint(self, lease: TrainerLease, version: int, path: str) -> CheckpointRecord:
        """Write a checkpoint that is complete on disk. Raises VersionConflict when the version has another one."""
        new_checkpoint = insert(Checkpoint).values(run_id=lease.run_id, version=version, path=path)
        async with self._database.transaction() as session:
            await check_lease(session, lease)
            await session.execute(new_checkpoint.on_conflict_do_nothing())
            stored = CheckpointRecord.model_validate(await session.get_one(Checkpoint, (lease.run_id, version)))
        if stored.path != path:
            raise VersionConflict(lease.run_id, version, "checkpoint path", stored.path, path)
        return stored

    async def checkpoints(self, run_id: str) -> list[CheckpointRecord]:
        """The checkpoints of a run, oldest version first."""
        wanted = select(Checkpoint).where(Checkpoint.run_id == run_id).order_by(Checkpoint.version)
        async with self._database.transaction() as session:
            return [CheckpointRecord.model_validate(stored) for stored in await session.scalars(wanted)]

    async def forget_checkpoint(self, lease: TrainerLease, version: int) -> None:
        """Remove the record before the files go; one that is not there is forgotten already."""
        async with self._database.transaction() as session:
            await check_lease(session, lease)
            await session.execute(delete(Checkpoint).where(*_is(Checkpoint, lease.run_id, version)))


def _is(table: type[PolicyVersion | Checkpoint], run_id: str, version: int) -> tuple[ColumnElement[bool], ...]:
    return table.run_id == run_id, table.version == version
