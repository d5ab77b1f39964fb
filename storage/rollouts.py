"""Rollouts and attempts: a rollout settles once, by its current attempt only.

Beginning an attempt fences every earlier one; a late answer of a fenced attempt is refused and changes nothing. Each
method locks the rollout's row first, so that two workers that believe in the same rollout take turns.
"""

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import ColumnElement, ScalarSelect, Select, Update, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from storage.database import Database
from storage.errors import AttemptFenced, UnknownAttempt, UnknownRollout
from storage.models.model_calls import ModelCall, SelectedResponse
from storage.models.rollouts import Attempt, Rollout
from storage.records import AttemptRecord, BegunAttempt, Boundary, Bucket, Recovery, SettledRollout, Settlement
from storage.samples import next_attempt, previous_attempt
from storage.seals import check_seal, seal


class Rollouts:
    """Begin, settle, fail, and give up."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin_attempt(
        self,
        rollout_id: str,
        worker: str,
        *,
        recovery: Recovery,
        policy_version: int,
        max_replay_age_versions: int,
        fresh_after: int | None = None,
    ) -> BegunAttempt | SettledRollout:
        """A new attempt, now the current one; or the settlement, if there is one already.

        It replays the recorded responses of the attempt before it, or begins a new sample and says why (see
        `storage.samples`). Raises RecoveryRefused when an attempt began before and `recovery` is none.
        """
        async with self._database.transaction() as session:
            rollout = await _lock(session, rollout_id)
            if rollout.state != "open":
                return await _settled(session, rollout_id)
            before = await previous_attempt(session, rollout_id, rollout.current_attempt)
            begun = next_attempt(rollout_id, before, recovery, policy_version, max_replay_age_versions, fresh_after)
            await _abandon(session, rollout_id)
            # The clock is read under the lock: no call of an earlier attempt is recorded after this moment.
            new = insert(Attempt).values(
                rollout_id=rollout_id,
                worker=worker,
                started_at=func.clock_timestamp(),
                **begun.model_dump(exclude={"recorded"}),
            )
            await session.execute(new)
            await session.execute(_change(rollout_id).values(current_attempt=begun.attempt))
            return begun

    async def settle(self, settlement: Settlement) -> SettledRollout:
        """Write the outcome, its seal and what it selected at once. The same outcome of the same attempt again returns
        what is stored; another one is a SealConflict, that of another attempt is AttemptFenced."""
        rollout_id, number = settlement.rollout_id, settlement.attempt
        if settlement.state == "valid" and (settlement.reward is None or settlement.evidence_digest is None):
            raise ValueError(f"rollout {rollout_id!r} cannot be valid without a reward and an evidence_digest")
        if settlement.state == "masked" and not settlement.reason:
            raise ValueError(f"rollout {rollout_id!r} cannot be masked without a reason")
        async with self._database.transaction() as session:
            rollout = await _lock(session, rollout_id)
            attempt = await _attempt(session, rollout_id, number)
            is_open = rollout.state == "open"
            if rollout.current_attempt != number or attempt.state != ("running" if is_open else "settled"):
                raise AttemptFenced(rollout_id, number, rollout.current_attempt, attempt.state)
            if not is_open:
                await check_seal(session, settlement)
                return await _settled(session, rollout_id)
            await seal(session, settlement, attempt.sample)
            await _end(session, rollout_id, number, state="settled")
            outcome = settlement.model_dump(exclude={"rollout_id", "attempt", "selected", "reported"})
            await session.execute(_change(rollout_id).values(**outcome, settled_attempt=number, settled_at=func.now()))
            return await _settled(session, rollout_id)

    async def fail_attempt(
        self, rollout_id: str, attempt: int, boundary: Boundary, bucket: Bucket, failure_class: str, cause: str
    ) -> AttemptRecord:
        """Write why an attempt ended without a result. An attempt that has ended keeps what is stored."""
        async with self._database.transaction() as session:
            await _lock(session, rollout_id)
            stored = await _attempt(session, rollout_id, attempt)
            if stored.state == "running":
                await _end(
                    session,
                    rollout_id,
                    attempt,
                    state="failed",
                    boundary=boundary,
                    bucket=bucket,
                    failure_class=failure_class,
                    cause=cause,
                )
                stored = await _attempt(session, rollout_id, attempt)
            return AttemptRecord.model_validate(stored)

    async def lose(self, rollout_id: str, state: Literal["lost", "masked"], reason: str) -> SettledRollout:
        """Give up an open rollout: lost, or masked so that its group can go on. A lost one may still be masked."""
        async with self._database.transaction() as session:
            rollout = await _lock(session, rollout_id)
            if rollout.state == "open" or (rollout.state == "lost" and state == "masked"):
                await _abandon(session, rollout_id)
                await session.execute(_change(rollout_id).values(state=state, reason=reason, settled_at=func.now()))
            return await _settled(session, rollout_id)

    async def settled(self, group_ids: Sequence[str]) -> list[SettledRollout]:
        """The rollouts of these groups that are no longer open: groups in the order given, rollouts by index."""
        wanted = _settlements().where(Rollout.group_id.in_(group_ids))
        place = {group_id: position for position, group_id in enumerate(group_ids)}
        async with self._database.transaction() as session:
            rows = await session.execute(wanted)
            settled = [SettledRollout.model_validate(row) for row in rows]
        return sorted(settled, key=lambda rollout: (place[rollout.group_id], rollout.index))


async def _lock(session: AsyncSession, rollout_id: str) -> Rollout:
    rollout = await session.scalar(select(Rollout).where(Rollout.rollout_id == rollout_id).with_for_update())
    if rollout is None:
        raise UnknownRollout(rollout_id)
    return rollout


async def _attempt(session: AsyncSession, rollout_id: str, attempt: int) -> Attempt:
    stored = await session.get(Attempt, (rollout_id, attempt), populate_existing=True)
    if stored is None:
        raise UnknownAttempt(rollout_id, attempt)
    return stored


def _change(rollout_id: str) -> Update:
    return update(Rollout).where(Rollout.rollout_id == rollout_id).execution_options(synchronize_session=False)


async def _end(session: AsyncSession, rollout_id: str, attempt: int, **outcome: str) -> None:
    this = (Attempt.rollout_id == rollout_id, Attempt.attempt == attempt)
    end = update(Attempt).where(*this).values(**outcome, ended_at=func.now())
    await session.execute(end.execution_options(synchronize_session=False))


async def _abandon(session: AsyncSession, rollout_id: str) -> None:
    running = (Attempt.rollout_id == rollout_id, Attempt.state == "running")
    abandon = update(Attempt).where(*running).values(state="abandoned", ended_at=func.now())
    await session.execute(abandon.execution_options(synchronize_session=False))


async def _settled(session: AsyncSession, rollout_id: str) -> SettledRollout:
    rows = await session.execute(_settlements().where(Rollout.rollout_id == rollout_id))
    return SettledRollout.model_validate(rows.one())


def _settlements() -> Select[*tuple[Any, ...]]:
    """The columns of a SettledRollout. `attempt` is null only when no attempt ever began."""
    attempt = func.coalesce(Rollout.settled_attempt, Rollout.current_attempt)
    selected = _count(SelectedResponse, SelectedResponse.attempt == Rollout.settled_attempt)
    attempts = _count(Attempt)
    generated = _count(ModelCall, ModelCall.outcome.in_(("generated", "reported")))
    replayed = _count(ModelCall, ModelCall.outcome == "replayed")
    return select(
        Rollout.rollout_id,
        Rollout.group_id,
        Rollout.index,
        Rollout.state,
        attempt.label("attempt"),
        Rollout.reward,
        Rollout.truncated,
        Rollout.reason,
        Rollout.policy_version_min,
        Rollout.policy_version_max,
        Rollout.evidence_digest,
        Rollout.segments,
        selected.label("model_calls"),
        attempts.label("attempts"),
        generated.label("generated_calls"),
        replayed.label("replayed_calls"),
    ).where(Rollout.state != "open")


def _count(table: type[Attempt | ModelCall | SelectedResponse], *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    rows = select(func.count()).select_from(table)
    return rows.where(table.rollout_id == Rollout.rollout_id, *conditions).scalar_subquery()
