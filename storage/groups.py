"""Prompt groups: opened with all their rollouts at once, moved only along legal transitions.

open -> sealed | parked | dropped | set_aside; parked -> open | sealed | dropped | set_aside; dropped -> open; sealed ->
trained. A group is sealed or set aside only when none of its rollouts is open, and set aside only when the rewards of
its valid rollouts are equal; that is final: its evidence stands, another group has its place. A parked or dropped group
that is opened again opens its lost rollouts again; their failed attempts stay in the ledger. A group whose place was
taken stays as it is, and so does one whose step has closed without it.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, case, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased, selectinload

from storage.closed_steps import closed, count_refusal, take_turn, take_turn_of
from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import GroupConflict, IllegalTransition, StepClosed, UnknownGroup, UnknownRun
from storage.models.rollouts import Attempt, Group, Rollout
from storage.promotions import place_refused, promotion_refused
from storage.records import Bucket, GroupRecord, GroupState, Purpose

LEGAL_FROM: Final[dict[GroupState, tuple[GroupState, ...]]] = {
    "open": ("parked", "dropped"),
    "sealed": ("open", "parked"),
    "parked": ("open",),
    "dropped": ("open", "parked"),
    "set_aside": ("open", "parked"),
    "trained": ("sealed",),
}


class Groups:
    """Open, move, promote, and find groups."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(
        self,
        group_id: str,
        run_id: str,
        step: int,
        slot: int,
        purpose: Purpose,
        prompt_id: str,
        row_index: int,
        num_rollouts: int,
        replaces: str | None = None,
    ) -> GroupRecord:
        """Write a group and its rollouts `{group_id}/rollout-{i}`; a group that is there must be the same one.

        Raises:
            GroupConflict: the id, the slot or the place of `replaces` belongs to a group that is not this one.
            StepClosed: the step has its batch.
            IllegalTransition: `replaces` has not given up its place in the step.
            UnknownGroup: there is no such group to replace; or no such copy (`storage.copies` makes those).
        """
        asked = {
            "run_id": run_id,
            "step": step,
            "slot": slot,
            "purpose": purpose,
            "prompt_id": prompt_id,
            "row_index": row_index,
            "num_rollouts": num_rollouts,
            "replaces": replaces,
        }
        try:
            async with self._database.transaction() as session:
                if purpose != "diagnostic":
                    await take_turn(session, run_id)
                    await _insert(session, group_id, asked)
                group = await self._read(session, group_id)
        except StepClosed as late:
            await count_refusal(self._database, run_id, step, group_id, late.asked)
            raise
        except IntegrityError as error:
            if broken_constraint(error) == "groups_run_id_fkey":
                raise UnknownRun(run_id) from None
            if broken_constraint(error) == "groups_replaces_fkey":
                raise UnknownGroup(str(replaces)) from None
            raise
        stored = group.model_dump(include=set(asked))
        if group.train_step != group.step:
            stored["replaces"] = None  # it was opened for a place of its own
        if stored != asked:
            differing = [key for key in asked if stored[key] != asked[key]]
            raise GroupConflict(
                group_id,
                ", ".join(f"{key}={stored[key]}" for key in differing),
                ", ".join(f"{key}={asked[key]}" for key in differing),
            )
        return group

    async def set_state(
        self, group_id: str, state: GroupState, bucket: Bucket | None = None, reason: str | None = None
    ) -> GroupRecord:
        """Move a group; to the state it is in already, a no-op. Parking, dropping and setting aside need a reason.

        A train group that becomes sealed, dropped or set aside gets the next place in the order of endings; opened
        again, it loses it. Raises StepClosed, IllegalTransition.
        """
        if state in ("parked", "dropped", "set_aside") and not reason:
            raise ValueError(f"group {group_id!r} cannot become {state} without a reason")
        successor = aliased(Group)
        replaced = exists().where(successor.replaces == group_id)
        some_open = exists().where(Rollout.group_id == group_id, Rollout.state == "open")
        move = update(Group).where(Group.group_id == group_id, Group.state.in_(LEGAL_FROM[state]), ~closed())
        if state in ("sealed", "set_aside"):
            move = move.where(~some_open)
        if state == "set_aside":
            move = move.where(Group.purpose == "train", _equal_rewards(group_id))
        if state == "open":
            move = move.where(~replaced)
        async with self._database.transaction() as session:
            run_id = await take_turn_of(session, group_id)
            values: dict[str, Any] = {"state": state, "bucket": bucket, "reason": reason}
            if state in ("sealed", "dropped", "set_aside"):
                values["ended_order"] = case((Group.purpose == "train", _next_order(run_id)))
            elif state == "open":
                values["ended_order"] = None
            moving = move.values(**values).returning(Group.group_id).execution_options(synchronize_session=False)
            moved = await session.scalar(moving)
            if moved is not None and state == "open":
                await session.execute(
                    update(Rollout)
                    .where(Rollout.group_id == group_id, Rollout.state == "lost")
                    .values(state="open", reason=None, settled_at=None)
                )
            group = await self._read(session, group_id)
            if moved is not None or group.state == state:
                return group
            late = await session.scalar(select(closed()).where(Group.group_id == group_id))
            given_away = state == "open" and await session.scalar(select(replaced))
        if late:
            await count_refusal(self._database, run_id, group.train_step, group_id, state)
            raise StepClosed(run_id, group.train_step, group_id, group.state, state)
        raise IllegalTransition(group_id, group.state, state, _why_not(group, state, given_away=bool(given_away)))

    async def promote(self, group_id: str, to_step: int, replaces: str) -> GroupRecord:
        """Let a sealed group train in an earlier step, in the place of a group that this one lost. Done already, a
        no-op. Raises StepClosed, IllegalTransition; both are counted as late."""
        async with self._database.transaction() as session:
            run_id = await take_turn_of(session, group_id)
            group = await self._read(session, group_id)
            if (group.train_step, group.replaces) == (to_step, replaces):
                return group
            refused = await promotion_refused(session, group, to_step, replaces)
            if refused is None:
                move = update(Group).where(Group.group_id == group_id).values(train_step=to_step, replaces=replaces)
                await session.execute(move.execution_options(synchronize_session=False))
                return await self._read(session, group_id)
        await count_refusal(self._database, run_id, to_step, group_id, "promoted")
        raise refused

    async def get(self, group_id: str) -> GroupRecord:
        """The group, or UnknownGroup."""
        async with self._database.snapshot() as session:
            return await self._read(session, group_id)

    async def list(
        self,
        run_id: str,
        step: int | None = None,
        state: GroupState | None = None,
        purpose: Purpose | None = None,
        *,
        states: Sequence[GroupState] | None = None,
        failure_class: str | None = None,
        since: datetime | None = None,
    ) -> list[GroupRecord]:
        """The groups of a run, by step and slot; every argument given narrows the list. `step` is the one that a group
        was opened for; `failure_class` that of any of its attempts; `since` is the earliest last change."""
        order = (Group.step, Group.purpose, Group.slot, Group.created_at)
        wanted = _whole_groups().where(Group.run_id == run_id).order_by(*order)
        if step is not None:
            wanted = wanted.where(Group.step == step)
        if state is not None:
            wanted = wanted.where(Group.state == state)
        if purpose is not None:
            wanted = wanted.where(Group.purpose == purpose)
        if states is not None:
            wanted = wanted.where(Group.state.in_(states))
        if failure_class is not None:
            failed = (Attempt.rollout_id == Rollout.rollout_id, Attempt.failure_class == failure_class)
            wanted = wanted.where(exists().where(Rollout.group_id == Group.group_id, *failed))
        if since is not None:
            wanted = wanted.where(Group.updated_at >= since)
        async with self._database.snapshot() as session:
            return [GroupRecord.model_validate(group) for group in await session.scalars(wanted)]

    async def _read(self, session: AsyncSession, group_id: str) -> GroupRecord:
        group = await session.scalar(
            _whole_groups().where(Group.group_id == group_id).execution_options(populate_existing=True)
        )
        if group is None:
            raise UnknownGroup(group_id)
        return GroupRecord.model_validate(group)


async def _insert(session: AsyncSession, group_id: str, asked: dict[str, Any]) -> None:
    """Write a new group; nothing when it is there."""
    run_id, step, replaces = asked["run_id"], asked["step"], asked["replaces"]
    new_group = insert(Group).values(group_id=group_id, train_step=step, **asked)
    # No target: the group may meet any of the unique keys first.
    if await session.scalar(new_group.on_conflict_do_nothing().returning(Group.group_id)) is None:
        if await session.get(Group, group_id) is None:
            raise await _conflict(session, group_id, asked)
        return
    if replaces is not None:
        refused = await place_refused(session, run_id, step, replaces, group_id)
        if refused is not None:
            raise refused
    if await session.scalar(select(closed()).where(Group.group_id == group_id)):
        raise StepClosed(run_id, step, group_id, None, "open")
    rollouts = [
        {"rollout_id": f"{group_id}/rollout-{index}", "group_id": group_id, "index": index}
        for index in range(asked["num_rollouts"])
    ]
    await session.execute(insert(Rollout), rollouts)


async def _conflict(session: AsyncSession, group_id: str, asked: dict[str, Any]) -> GroupConflict:
    """What another group has of a group that is not there."""
    by_place = select(Group.group_id).where(Group.replaces == asked["replaces"])
    successor = None if asked["replaces"] is None else await session.scalar(by_place)
    if successor is not None:
        return GroupConflict(group_id, f"another id for its place ({successor})", f"replaces={asked['replaces']}")
    return GroupConflict(group_id, "another id for its slot", f"slot {asked['slot']} of step {asked['step']}")


def _equal_rewards(group_id: str) -> ColumnElement[bool]:
    """Whether the valid rollouts of a group have one and the same reward; false where none is valid."""
    valid = (Rollout.group_id == group_id, Rollout.state == "valid")
    return select(func.min(Rollout.reward) == func.max(Rollout.reward)).where(*valid).scalar_subquery()


def _why_not(group: GroupRecord, state: GroupState, *, given_away: bool) -> str | None:
    """What else than its state keeps a group from moving."""
    if given_away:
        return "another group has taken its place"
    if state in ("sealed", "set_aside") and any(rollout.state == "open" for rollout in group.rollouts):
        return "some of its rollouts are open"
    if state == "set_aside" and group.state in LEGAL_FROM["set_aside"]:
        return "only a train group is, and only when all its valid rollouts have the same reward"
    return None


def _next_order(run_id: str) -> ColumnElement[int]:
    ended = aliased(Group)
    last = select(func.max(ended.ended_order)).where(ended.run_id == run_id, ended.ended_order.is_not(None))
    return func.coalesce(last.scalar_subquery(), 0) + 1


def _whole_groups() -> Select[Group]:
    return select(Group).options(selectinload(Group.rollouts).selectinload(Rollout.attempts))
