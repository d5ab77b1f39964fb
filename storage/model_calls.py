"""Model calls: a response is in the ledger before it is released, and a later attempt gets it from here.

1. `claim` gives the attempt the next occurrence of a request, answered if an earlier attempt of the sample recorded it.
2. `record` writes what was generated, in one transaction with the fence. When it returns, the response is durable.
3. A call of an attempt that is not current any more is `AttemptFenced`, whoever makes it and however late.
"""

# pyright: reportMissingTypeStubs=false
# (the driver comes without stubs)

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from asyncpg import IntegrityConstraintViolationError
from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncSession

from storage import call_statements as sql
from storage.blobs import BlobStore
from storage.call_events import call_of, read_events
from storage.call_lineage import Narrowing, read_lineage
from storage.call_recording import Parents, recording, values_of
from storage.constraints import FENCE
from storage.database import Database
from storage.errors import (
    AttemptFenced,
    CallConflict,
    LeaseLost,
    StorageError,
    UnknownAttempt,
    UnknownRollout,
)
from storage.models.model_calls import GENERATED_ONCE, ModelCallLease
from storage.records import (
    AttemptCall,
    CallLease,
    CallPosition,
    GeneratedResponse,
    LeaseRecord,
    ParentCall,
    RecordedResponse,
)


class ModelCalls:
    """Claim, record, fail, release; find parents; read an attempt."""

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self._blobs = blobs
        self._parents = Parents(database)

    async def claim(self, rollout_id: str, attempt: int, fingerprint: str) -> CallLease:
        """Hold the next occurrence of a request; what was recorded for it counts as replayed from now on."""
        claimed = await self._database.fetch_row(sql.CLAIM, (rollout_id, attempt, fingerprint))
        if claimed is None:
            raise UnknownRollout(rollout_id)
        sample = _current(claimed, rollout_id, attempt)
        recorded = None
        if claimed["replayed_from"] is not None:
            async with self._database.statement() as connection:
                lineage = await read_lineage(connection, rollout_id, attempt, "ordinal", ordinal=claimed["ordinal"])
            await lineage.load(self._blobs)
            recorded = lineage.response(lineage.wanted[0])
        return CallLease(
            rollout_id=rollout_id,
            attempt=attempt,
            ordinal=claimed["ordinal"],
            sample=sample,
            fingerprint=fingerprint,
            occurrence=claimed["occurrence"],
            recorded=recorded,
        )

    async def record(self, lease: CallLease, response: GeneratedResponse) -> RecordedResponse:
        """Write a response. Writing the same one again returns what is stored.

        Raises:
            AttemptFenced: a later attempt has begun.
            LeaseLost: the call was released.
            LineageBroken: the prompt is not what the parent's tokens, continued, would be.
            CallConflict: the call has another outcome.
            LedgerUnavailable, BlobWriteError: it may be in the ledger or not, and must not be released.
        """
        position = CallPosition(attempt=lease.attempt, ordinal=lease.ordinal)
        parent = await self._parents.of(lease, response)
        written = recording(lease, response, parent)
        blob = None
        if written.payload.size_bytes > self._database.inline_payload_bytes:
            blob = await self._blobs.put(written.payload.packed())
        ended_at = await self._write(lease, sql.RECORD, values_of(lease, response, written, blob), written.digest)
        if ended_at is None:
            raise LeaseLost(lease.rollout_id, lease.attempt, lease.ordinal)
        self._parents.keep(lease.rollout_id, position, written.as_parent(lease.sample, response))
        return RecordedResponse.model_construct(  # every part has been validated
            **dict(response),
            position=position,
            sample=lease.sample,
            fingerprint=lease.fingerprint,
            occurrence=lease.occurrence,
            digest=written.digest,
            chain_digest=written.chain_digest,
            cumulative_digest=written.cumulative_digest,
            ended_at=ended_at,
        )

    async def fail(self, lease: CallLease, failure_class: str, cause: str) -> None:
        """Write that a call got no response, and release it: the same request may be claimed again."""
        failure = (lease.rollout_id, lease.attempt, lease.ordinal, failure_class, cause)
        if await self._write(lease, sql.FAIL, failure) is None:
            stored = await self._outcome(lease)
            if stored is None:
                raise LeaseLost(lease.rollout_id, lease.attempt, lease.ordinal)
            if stored["failure_class"] != failure_class:
                raise CallConflict(lease.rollout_id, lease.attempt, lease.ordinal)

    async def release(self, lease: CallLease) -> None:
        """Give up a call of which nothing came, as when its client went away. A recorded one stays held."""
        async with self._database.transaction() as session:
            await session.execute(sql.LOCK_LEASE, _place(lease))
            await session.execute(sql.RELEASE, _place(lease))

    async def measure(self, rollout_id: str, attempt: int, prompt_tokens: int) -> None:
        """Write that the agent measured a prompt without sending it."""
        place = {"rollout_id": rollout_id, "attempt": attempt}
        async with self._database.transaction() as session:
            sample = await _lock(session, rollout_id, attempt)
            await session.execute(sql.MEASURE, {**place, "sample": sample, "prompt_tokens": prompt_tokens})

    async def parents_by_conversation(self, rollout_id: str, attempt: int, key: str) -> list[ParentCall]:
        """The calls with this conversation key that the attempt generated or replayed."""
        return await self._find_parents(rollout_id, attempt, "conversation", key)

    async def parents_by_tokens(self, rollout_id: str, attempt: int, cumulative_digest: str) -> list[ParentCall]:
        """The calls with exactly these prompt and sampled tokens that the attempt generated or replayed."""
        return await self._find_parents(rollout_id, attempt, "cumulative_digest", cumulative_digest)

    async def of_attempt(self, rollout_id: str, attempt: int) -> list[AttemptCall]:
        """Every call of an attempt by ordinal. Raises EvidenceCorrupt when a response is not what its digest says."""
        async with self._database.snapshot() as session:
            events = await read_events(session, rollout_id, attempt)
            lineage = await read_lineage(session, rollout_id, attempt, "all")
        await lineage.load(self._blobs)
        responses = {position: lineage.response(position) for position in lineage.wanted}
        return [call_of(event, responses) for event in events]

    async def leases(self, rollout_id: str, attempt: int) -> list[LeaseRecord]:
        """Every lease of an attempt by ordinal, released ones included."""
        wanted = select(ModelCallLease).where(
            ModelCallLease.rollout_id == rollout_id, ModelCallLease.attempt == attempt
        )
        async with self._database.transaction() as session:
            rows = await session.scalars(wanted.order_by(ModelCallLease.ordinal))
            return [LeaseRecord.model_validate(row) for row in rows]

    async def _write(
        self, lease: CallLease, statement: str, values: tuple[object, ...], digest: str | None = None
    ) -> datetime | None:
        """Write the outcome of a held call: when it ended. None: the call is not held. An equal outcome stands."""
        try:
            row = await self._database.fetch_row(statement, values)
            return None if row is None else row["ended_at"]
        except IntegrityConstraintViolationError as error:
            broken: str | None = getattr(error, "constraint_name", None)
            if broken == FENCE:
                raise await self._fenced(lease.rollout_id, lease.attempt) from None
            if broken not in ("model_calls_pkey", GENERATED_ONCE):
                raise
        stored = await self._outcome(lease)
        if stored is None or stored["digest"] != digest:
            raise CallConflict(lease.rollout_id, lease.attempt, lease.ordinal)
        return stored["ended_at"]

    async def _outcome(self, lease: CallLease) -> RowMapping | None:
        async with self._database.statement() as connection:
            return (await connection.execute(sql.OUTCOME, _place(lease))).mappings().one_or_none()

    async def _fenced(self, rollout_id: str, attempt: int) -> StorageError:
        """Why the fence refused a call: in words."""
        async with self._database.transaction() as session:
            try:
                await _lock(session, rollout_id, attempt)
            except (AttemptFenced, UnknownAttempt, UnknownRollout) as refused:
                return refused
        return AttemptFenced(rollout_id, attempt, attempt, "closed")

    async def _find_parents(self, rollout_id: str, attempt: int, by: Narrowing, key: str) -> list[ParentCall]:
        async with self._database.statement() as connection:
            lineage = await read_lineage(connection, rollout_id, attempt, by, **{by: key})
        await lineage.load(self._blobs)
        return [lineage.parent(position) for position in lineage.wanted]


async def _lock(session: AsyncSession, rollout_id: str, attempt: int) -> int:
    """Take the rollout's turn for an attempt that is current; the attempt's sample."""
    place = {"rollout_id": rollout_id, "attempt": attempt}
    rollout = (await session.execute(sql.LOCK_ROLLOUT, place)).mappings().one_or_none()
    if rollout is None:
        raise UnknownRollout(rollout_id)
    return _current(rollout, rollout_id, attempt)


def _current(rollout: Mapping[Any, Any], rollout_id: str, attempt: int) -> int:
    """The sample of an attempt, if it is the current one of an open rollout."""
    if rollout["state"] is None:
        raise UnknownRollout(rollout_id)
    if rollout["attempt_state"] is None:
        raise UnknownAttempt(rollout_id, attempt)
    if rollout["current_attempt"] != attempt or rollout["state"] != "open":
        raise AttemptFenced(rollout_id, attempt, rollout["current_attempt"], rollout["attempt_state"])
    return rollout["sample"]


def _place(lease: CallLease) -> dict[str, str | int]:
    return {"rollout_id": lease.rollout_id, "attempt": lease.attempt, "ordinal": lease.ordinal}
