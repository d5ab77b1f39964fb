"""Stored batches: what a step trains on, and which groups it was made of. A step has one batch, for ever.

Storing it closes the step: from then on no group joins the step, leaves it, or changes in it (`storage.closed_steps`).
"""

from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from storage.closed_steps import take_turn
from storage.constraints import broken_constraint, refused_detail
from storage.database import Database
from storage.errors import BatchConflict, BatchGroupRefused, UnknownBatch, UnknownRun
from storage.models.rollouts import Group
from storage.models.steps import OF_THE_STEP, Batch, BatchGroup
from storage.records import BatchRecord


class Batches:
    """Store and find batches; their bytes are in the blob store under the digest."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def store(
        self,
        run_id: str,
        step: int,
        digest: str,
        rows: int,
        rollouts: int,
        trained_tokens: int,
        segments_max: int,
        mean_reward: float | None,
        group_ids: Sequence[str],
    ) -> BatchRecord:
        """Write the batch of a step and its groups. Raises BatchConflict when the step has another batch."""
        new_batch = insert(Batch).values(
            run_id=run_id,
            step=step,
            digest=digest,
            rows=rows,
            rollouts=rollouts,
            trained_tokens=trained_tokens,
            segments_max=segments_max,
            mean_reward=mean_reward,
        )
        members = [
            {"run_id": run_id, "step": step, "position": position, "group_id": group_id}
            for position, group_id in enumerate(group_ids)
        ]
        try:
            async with self._database.transaction() as session:
                await take_turn(session, run_id)
                # No target: of two equal writes at once, the second may meet either of the two unique keys first.
                inserted = await session.scalar(new_batch.on_conflict_do_nothing().returning(Batch.step))
                if inserted is not None and members:
                    await session.execute(insert(BatchGroup), members)
                    await _refuse_others(session, run_id, step, group_ids)
                stored = (await session.scalars(_whole_batches(run_id).where(Batch.step == step))).one()
        except IntegrityError as error:
            if broken_constraint(error) == "batches_run_id_fkey":
                raise UnknownRun(run_id) from None
            if broken_constraint(error) in (OF_THE_STEP, "batch_groups_group_id_key"):
                raise BatchGroupRefused(run_id, step, refused_detail(error)) from None
            raise
        if stored.digest != digest:
            raise BatchConflict(run_id, step, stored.digest, digest)
        return _record(stored)

    async def get(self, run_id: str, step: int) -> BatchRecord | None:
        """The batch of a step, if one is stored."""
        async with self._database.transaction() as session:
            stored = await session.scalar(_whole_batches(run_id).where(Batch.step == step))
            return None if stored is None else _record(stored)

    async def range(self, run_id: str, first: int, last: int) -> tuple[BatchRecord, ...]:
        """The batches of steps first..last, both included, in order; all of them, or UnknownBatch."""
        wanted = _whole_batches(run_id).where(Batch.step.between(first, last)).order_by(Batch.step)
        async with self._database.transaction() as session:
            batches = {batch.step: _record(batch) for batch in await session.scalars(wanted)}
        for step in range(first, last + 1):
            if step not in batches:
                raise UnknownBatch(run_id, step)
        return tuple(batches.values())


async def _refuse_others(session: AsyncSession, run_id: str, step: int, group_ids: Sequence[str]) -> None:
    """Only groups that train are in a batch: no evaluation, no diagnostic copy."""
    others = select(Group.group_id, Group.purpose).where(Group.group_id.in_(group_ids), Group.purpose != "train")
    other = (await session.execute(others.limit(1))).one_or_none()
    if other is not None:
        raise BatchGroupRefused(run_id, step, f"{other.group_id!r} is a {other.purpose} group")


def _whole_batches(run_id: str) -> Select[Batch]:
    return select(Batch).options(selectinload(Batch.groups)).where(Batch.run_id == run_id)


def _record(batch: Batch) -> BatchRecord:
    return BatchRecord(
        run_id=batch.run_id,
        step=batch.step,
        digest=batch.digest,
        rows=batch.rows,
        rollouts=batch.rollouts,
        trained_tokens=batch.trained_tokens,
        segments_max=batch.segments_max,
        mean_reward=batch.mean_reward,
        group_ids=tuple(member.group_id for member in batch.groups),
    )
