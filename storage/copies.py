"""Diagnostic copies: a group that has ended, to be run again without touching the run.

A copy `{group}/replay-{k}` has the attempts and model calls of its original under the same numbers, at the same times,
so its next attempt replays what the last one of the original recorded, and goes live where it differs. It has neither
outcomes nor seals. Copied attempts end as abandoned; one that failed for the infrastructure stays failed, and one that
failed for its data keeps the cause but not the bucket, which would ask for a fresh sample. Large payloads are shared.
"""

from typing import Final

from sqlalchemy import func, insert, literal, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import BlobMissing, IllegalTransition, UnknownGroup
from storage.groups import Groups
from storage.models.model_calls import ModelCall, ModelCallLease
from storage.models.rollouts import Group, Rollout
from storage.records import GroupRecord

# No call is recorded, no attempt begins and no rollout settles until the copy is made.
HOLD: Final = text("SELECT FROM rollouts WHERE group_id = :original ORDER BY rollout_id FOR NO KEY UPDATE")
ATTEMPTS: Final = text("""
INSERT INTO attempts
    (rollout_id, attempt, state, worker, sample, fresh_reason, boundary, bucket, failure_class, cause, started_at,
     ended_at)
SELECT :copy || '/rollout-' || rollouts.index, attempt,
    CASE WHEN attempts.state = 'failed' AND bucket = 'infra' THEN 'failed' ELSE 'abandoned' END,
    worker, sample, fresh_reason, boundary, CASE WHEN bucket = 'infra' THEN bucket END, failure_class, cause,
    started_at, coalesce(ended_at, clock_timestamp())
FROM attempts JOIN rollouts USING (rollout_id) WHERE group_id = :original
""")
# The fence lets calls of the current attempt in; so the attempts are gone through in their order.
BEGIN: Final = text("""
UPDATE rollouts SET current_attempt = :attempt FROM attempts
WHERE group_id = :copy AND attempts.rollout_id = rollouts.rollout_id AND attempts.attempt = :attempt
""")
LAST_ATTEMPT: Final = text("""
SELECT max(attempt) FROM attempts JOIN rollouts USING (rollout_id) WHERE group_id = :original
""")


class Copies:
    """Copy a group."""

    def __init__(self, database: Database, groups: Groups, blobs: BlobStore) -> None:
        self._database = database
        self._groups = groups
        self._blobs = blobs

    async def open(self, group_id: str) -> GroupRecord:
        """A new copy of a group, open.

        Raises:
            UnknownGroup: there is no such group.
            IllegalTransition: the group is open or parked, so that it can be retried itself.
            BlobMissing: what a call recorded is gone from the blob store.
        """
        await self._check_blobs(group_id)
        async with self._database.transaction() as session:
            # The lock keeps the group as it is, and lets copies of it take turns.
            wanted = select(Group).where(Group.group_id == group_id).with_for_update(key_share=True)
            original = await session.scalar(wanted)
            if original is None:
                raise UnknownGroup(group_id)
            if original.state in ("open", "parked"):
                why = "it has not ended; retry it, or drop it first"
                raise IllegalTransition(group_id, original.state, "the original of a replay", why)
            copies = select(func.count()).select_from(Group).where(Group.copy_of == group_id)
            copy = f"{group_id}/replay-{await session.scalar(copies)}"
            await session.execute(HOLD, {"original": group_id})
            await _write_group(session, original, copy)
            await session.execute(ATTEMPTS, {"original": group_id, "copy": copy})
            last = await session.scalar(LAST_ATTEMPT, {"original": group_id})
            for attempt in range(0 if last is None else last + 1):
                await session.execute(BEGIN, {"copy": copy, "attempt": attempt})
                for table in (ModelCallLease, ModelCall):
                    await _copy_rows(session, table, group_id, copy, attempt)
        return await self._groups.get(copy)

    async def _check_blobs(self, group_id: str) -> None:
        wanted = select(ModelCall.blob).distinct().join(Rollout, Rollout.rollout_id == ModelCall.rollout_id)
        async with self._database.transaction() as session:
            digests = await session.scalars(wanted.where(Rollout.group_id == group_id, ModelCall.blob.is_not(None)))
        for digest in digests:
            if digest is not None and not await self._blobs.exists(digest):
                raise BlobMissing(self._blobs.path_of(digest))


async def _write_group(session: AsyncSession, original: Group, copy: str) -> None:
    same = ("run_id", "step", "slot", "prompt_id", "row_index", "num_rollouts")
    now = func.clock_timestamp()  # after the beginning of every attempt that is copied
    new_group = insert(Group).values(
        group_id=copy,
        purpose="diagnostic",
        copy_of=original.group_id,
        train_step=original.step,
        created_at=now,
        updated_at=now,
        **{name: getattr(original, name) for name in same},
    )
    await session.execute(new_group)
    rollouts = [
        {"rollout_id": f"{copy}/rollout-{index}", "group_id": copy, "index": index}
        for index in range(original.num_rollouts)
    ]
    await session.execute(insert(Rollout), rollouts)


async def _copy_rows(
    session: AsyncSession, table: type[ModelCall | ModelCallLease], original: str, copy: str, attempt: int
) -> None:
    """Every column as it is, except whose rollout it is."""
    columns = [column for column in table.__table__.columns if column.name != "rollout_id"]
    rollout_id = literal(f"{copy}/rollout-").concat(Rollout.index)
    rows = select(rollout_id, *columns).join(Rollout, Rollout.rollout_id == table.rollout_id)
    wanted = rows.where(Rollout.group_id == original, table.attempt == attempt)
    names = ["rollout_id", *(column.name for column in columns)]
    await session.execute(insert(table).from_select(names, wanted, include_defaults=False))
