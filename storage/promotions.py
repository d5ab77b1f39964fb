"""Who may take whose place: one group after another, and only a place that was given up.

A place is given up when its group is dropped or set aside, or was lent to an earlier step. Only a group in the place
that it was opened for is lent: one that took a place would leave its step without a way back to that place.
"""

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from storage.errors import IllegalTransition, StepClosed, StorageError, UnknownGroup
from storage.models.rollouts import Group
from storage.models.steps import Batch, BatchGroup
from storage.records import GroupRecord


async def place_refused(
    session: AsyncSession, run_id: str, step: int, lost: str, successor: str
) -> IllegalTransition | None:
    """Why a group may not take the place of another in a step; None when it may. UnknownGroup for another run's."""
    columns = (Group.run_id, Group.purpose, Group.state, Group.step, Group.train_step)
    stored = (await session.execute(select(*columns).where(Group.group_id == lost))).one_or_none()
    if stored is None or stored.run_id != run_id:
        raise UnknownGroup(lost)
    taken_by = await session.scalar(select(Group.group_id).where(Group.replaces == lost))
    why = None
    if taken_by not in (None, successor):
        why = f"group {taken_by!r} has its place"
    elif stored.purpose != "train":
        why = f"it is a {stored.purpose} group"
    elif step not in (stored.step, stored.train_step):
        why = f"it has no place in step {step}"
    elif stored.train_step == step and stored.state not in ("dropped", "set_aside"):
        why = f"it keeps its place in step {step} until it is dropped or set aside"
    return (
        None
        if why is None
        else IllegalTransition(lost, stored.state, f"the one that group {successor!r} replaces", why)
    )


async def promotion_refused(
    session: AsyncSession, group: GroupRecord, to_step: int, replaces: str
) -> StorageError | None:
    """Why a group may not train in an earlier step, in the place of a group that this one lost; None when it may."""
    run_id, group_id = group.run_id, group.group_id
    if await session.scalar(select(exists().where(Batch.run_id == run_id, Batch.step == to_step))):
        return StepClosed(run_id, to_step, group_id, group.state, "promoted")
    why = None
    if group.purpose != "train":
        why = f"it is a {group.purpose} group"
    elif to_step >= group.train_step:
        why = f"it trains in step {group.train_step}, which is not a later one"
    elif group.state != "sealed":
        why = "only a sealed group is promoted"
    elif group.replaces is not None:
        why = f"it has the place of group {group.replaces!r} in step {group.train_step}"
    elif await session.scalar(select(exists().where(BatchGroup.group_id == group_id))):
        why = f"it is in the batch of step {group.train_step}"
    if why is not None:
        return IllegalTransition(group_id, group.state, f"a group of step {to_step}", why)
    return await place_refused(session, run_id, to_step, replaces, group_id)
