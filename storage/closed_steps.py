"""Closed steps: once the batch of a step is stored, its groups are what they are.

Whatever opens, ends or moves a group, and whatever stores a batch, takes the run's turn first; the statements after
that see all that was done in turns before. So a batch comes before or after the change of a group, and the endings of
groups have an order. A change that is refused is counted.
"""

from typing import Final

from sqlalchemy import ColumnElement, and_, exists, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from storage.database import Database
from storage.errors import UnknownGroup
from storage.models.operations import LateRefusal
from storage.models.rollouts import Group
from storage.models.steps import Batch, BatchGroup

TURN: Final = text("SELECT pg_advisory_xact_lock(hashtextextended('groups/' || :run_id, 0))")
TURN_OF_GROUP: Final = text("""
SELECT run_id, pg_advisory_xact_lock(hashtextextended('groups/' || run_id, 0)) FROM groups WHERE group_id = :group_id
""")


async def take_turn(session: AsyncSession, run_id: str) -> None:
    """Wait for the run's turn, which ends with the transaction."""
    await session.execute(TURN, {"run_id": run_id})


async def take_turn_of(session: AsyncSession, group_id: str) -> str:
    """The same for the run of a group, which is returned. UnknownGroup when there is no such group."""
    run_id = await session.scalar(TURN_OF_GROUP, {"group_id": group_id})
    if run_id is None:
        raise UnknownGroup(group_id)
    return run_id


def closed() -> ColumnElement[bool]:
    """Whether the step that trains a group has its batch, without the group."""
    stored = exists().where(Batch.run_id == Group.run_id, Batch.step == Group.train_step).correlate(Group)
    contains = exists().where(BatchGroup.group_id == Group.group_id).correlate(Group)
    return and_(Group.purpose == "train", stored, ~contains)


async def count_refusal(database: Database, run_id: str, step: int, group_id: str, asked: str) -> None:
    """Write that something came too late. In a transaction of its own: what was asked for has left nothing behind."""
    late = insert(LateRefusal).values(run_id=run_id, step=step, group_id=group_id, asked=asked)
    async with database.transaction() as session:
        await session.execute(late.on_conflict_do_nothing())
