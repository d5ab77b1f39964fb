"""NeMo-Gym's token captures: entries of calls, frozen, read and retired by its rules.

An entry is written once; an equal second write changes nothing, another one is refused. A frozen capture takes no
entries. Marking it incomplete always works, and changes its version, so that a snapshot read before is not retired.
"""

import uuid

from pydantic import Field
from sqlalchemy import Update, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert

from storage.database import Database
from storage.errors import CaptureConflict, CaptureFrozen
from storage.models.captures import Capture, CapturedCall
from storage.records import CallPosition, Record


class CapturedEntry(Record):
    """One call as NeMo-Gym describes it. `digest` covers the whole entry; `entry` lacks the token arrays where `call`
    says which generated call of the ledger has them. `continuation` is NeMo-Gym's key of what may follow."""

    model_call_id: str = Field(min_length=1)
    entry: bytes
    digest: str
    continuation: str
    rollout_id: str | None = None
    call: CallPosition | None = None


class CaptureSnapshot(Record):
    """A frozen capture, as it stands at `version`."""

    snapshot_id: str
    version: int
    incomplete: bool
    entries: tuple[CapturedEntry, ...]


class Captures:
    """Begin, put, freeze, retire."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, capture_id: str, model_call_id: str) -> None:
        """A call is about to run. If nothing follows, the capture is incomplete."""
        async with self._database.transaction() as session:
            await session.execute(insert(Capture).values(capture_id=capture_id).on_conflict_do_nothing())
            begun = insert(CapturedCall).values(capture_id=capture_id, model_call_id=model_call_id)
            await session.execute(begun.on_conflict_do_nothing())

    async def put(self, capture_id: str, captured: CapturedEntry) -> None:
        """Store the entry of a call. Raises CaptureConflict or CaptureFrozen."""
        content = {
            "entry": captured.entry,
            "digest": captured.digest,
            "continuation": captured.continuation,
            "rollout_id": captured.rollout_id,
            "attempt": captured.call and captured.call.attempt,
            "ordinal": captured.call and captured.call.ordinal,
        }
        this = (CapturedCall.capture_id == capture_id, CapturedCall.model_call_id == captured.model_call_id)
        async with self._database.transaction() as session:
            opened = insert(Capture).values(capture_id=capture_id)
            locked = opened.on_conflict_do_update(index_elements=["capture_id"], set_={"capture_id": capture_id})
            frozen_at = await session.scalar(locked.returning(Capture.frozen_at))
            stored = await session.scalar(select(CapturedCall.digest).where(*this))
            if stored == captured.digest:
                return
            if stored is not None:
                raise CaptureConflict(capture_id, captured.model_call_id)
            if frozen_at is not None:
                raise CaptureFrozen(capture_id, captured.model_call_id)
            new = insert(CapturedCall).values(capture_id=capture_id, model_call_id=captured.model_call_id, **content)
            await session.execute(
                new.on_conflict_do_update(index_elements=["capture_id", "model_call_id"], set_=content)
            )
            await session.execute(_change(capture_id).values(version=Capture.version + 1))

    async def mark_incomplete(self, capture_id: str) -> None:
        """A call is missing, whatever else is there."""
        marked = insert(Capture).values(capture_id=capture_id, incomplete=True, version=1)
        changed = {"incomplete": True, "version": Capture.version + 1}
        async with self._database.transaction() as session:
            await session.execute(marked.on_conflict_do_update(index_elements=["capture_id"], set_=changed))

    async def freeze(self, capture_id: str) -> CaptureSnapshot:
        """The capture as it stays, unless somebody marks it incomplete."""
        now, snapshot_id = func.now(), uuid.uuid4().hex
        frozen = insert(Capture).values(capture_id=capture_id, frozen_at=now, snapshot_id=snapshot_id)
        kept = {
            "frozen_at": func.coalesce(Capture.frozen_at, now),
            "snapshot_id": func.coalesce(Capture.snapshot_id, snapshot_id),
        }
        columns = (Capture.snapshot_id, Capture.version, Capture.incomplete)
        async with self._database.transaction() as session:
            freezing = frozen.on_conflict_do_update(index_elements=["capture_id"], set_=kept).returning(*columns)
            capture = (await session.execute(freezing)).one()
            calls = (await session.scalars(select(CapturedCall).where(CapturedCall.capture_id == capture_id))).all()
        entries = tuple(entry for call in calls if (entry := _entry(call)) is not None)
        incomplete = capture.incomplete or len(entries) < len(calls)
        return CaptureSnapshot(
            snapshot_id=capture.snapshot_id, version=capture.version, incomplete=incomplete, entries=entries
        )

    async def retire(self, capture_id: str, snapshot_id: str, version: int) -> bool:
        """Delete the entries of exactly this snapshot; False when the capture has changed since."""
        this = (Capture.snapshot_id == snapshot_id, Capture.version == version)
        retiring = _change(capture_id).where(*this).values(retired_at=func.now())
        async with self._database.transaction() as session:
            retired = await session.scalar(retiring.returning(Capture.capture_id))
            if retired is not None:
                await session.execute(delete(CapturedCall).where(CapturedCall.capture_id == capture_id))
            return retired is not None

    async def continuing(self, capture_id: str, continuation: str) -> list[CapturedEntry]:
        """The entries that a request with this key may continue."""
        wanted = select(CapturedCall).where(
            CapturedCall.capture_id == capture_id, CapturedCall.continuation == continuation
        )
        async with self._database.transaction() as session:
            calls = (await session.scalars(wanted)).all()
        return [entry for call in calls if (entry := _entry(call)) is not None]


def _change(capture_id: str) -> Update:
    return update(Capture).where(Capture.capture_id == capture_id).execution_options(synchronize_session=False)


def _entry(call: CapturedCall) -> CapturedEntry | None:
    if call.entry is None or call.digest is None or call.continuation is None:
        return None
    position = None
    if call.attempt is not None and call.ordinal is not None:
        position = CallPosition(attempt=call.attempt, ordinal=call.ordinal)
    return CapturedEntry(
        model_call_id=call.model_call_id,
        entry=call.entry,
        digest=call.digest,
        continuation=call.continuation,
        rollout_id=call.rollout_id,
        call=position,
    )
