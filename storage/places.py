"""Which group stands for each slot of a step: the slot's own, or what took its place after it was lost, set aside or
lent.

The walk starts with the slot's own group and goes on from a group that is dropped or set aside, or trains in another
step, to the one that took its place in this step. A dropped group whose place nobody took stands for its slot, and may
be opened again. Every group has one successor at most (the tables enforce it), so the walk is the same whoever walks.
"""

from typing import Final

from sqlalchemy import select, text
from sqlalchemy.orm import selectinload

from storage.database import Database
from storage.models.rollouts import Group, Rollout
from storage.records import GroupRecord, Place, SetAsideGroup

# `used`: the replacements on the way back from the current group; a lent group brings those of the place it went to.
# What took the place of a group that was set aside replaces nothing that was lost.
WALK: Final = text("""
WITH RECURSIVE walk AS (
    SELECT slot AS place, 0 AS depth, group_id, state IN ('dropped', 'set_aside') OR train_step <> :step AS gone
    FROM groups WHERE run_id = :run_id AND purpose = 'train' AND step = :step AND slot < :count
    UNION ALL
    SELECT place, depth + 1, successor.group_id, successor.state IN ('dropped', 'set_aside')
    FROM walk JOIN groups AS successor ON successor.replaces = walk.group_id AND successor.train_step = :step
    WHERE gone
), current AS (
    SELECT DISTINCT ON (place) place, group_id FROM walk ORDER BY place, depth DESC
), back AS (
    SELECT place, current.group_id, replaces, step = train_step AS own FROM current JOIN groups USING (group_id)
    UNION ALL
    SELECT place, before.group_id, before.replaces, before.step = before.train_step
    FROM back JOIN groups AS before ON before.group_id = back.replaces
)
SELECT place, current.group_id, (
    SELECT count(*) FROM back JOIN groups AS lost ON lost.group_id = back.replaces
    WHERE back.place = current.place AND own AND lost.state <> 'set_aside'
) AS used
FROM current
""")
SET_ASIDE: Final = text("""
SELECT group_id, min(reward) AS reward FROM groups JOIN rollouts USING (group_id)
WHERE run_id = :run_id AND purpose = 'train' AND step = :step AND groups.state = 'set_aside'
    AND rollouts.state = 'valid'
GROUP BY group_id, slot ORDER BY slot
""")


class Places:
    """Find the groups of a step."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str, step: int, count: int) -> list[Place]:
        """The places of slots 0..count-1, in order."""
        async with self._database.snapshot() as session:
            walked = await session.execute(WALK, {"run_id": run_id, "step": step, "count": count})
            current = {row.place: (row.group_id, row.used) for row in walked}
            whole = select(Group).options(selectinload(Group.rollouts).selectinload(Rollout.attempts))
            wanted = whole.where(Group.group_id.in_([group_id for group_id, _ in current.values()]))
            groups = {group.group_id: GroupRecord.model_validate(group) for group in await session.scalars(wanted)}
        places: list[Place] = []
        for slot in range(count):
            group_id, used = current.get(slot, (None, 0))
            places.append(Place(slot=slot, group=None if group_id is None else groups[group_id], used=used))
        return places

    async def set_aside(self, run_id: str, step: int) -> list[SetAsideGroup]:
        """The groups that were sampled for a step and set aside, in the order of their slots."""
        async with self._database.statement() as connection:
            found = await connection.execute(SET_ASIDE, {"run_id": run_id, "step": step})
        return [SetAsideGroup.model_validate(row) for row in found]
