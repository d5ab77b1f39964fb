"""NeMo-Gym's token captures: what its sink wrote of the model calls of an attempt, by its own identities.

A capture is not evidence. Tokens of a call that is in the ledger are not stored again: the entry points to that call.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, LargeBinary, text
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, Written


class Capture(Base):
    """The captured calls of one attempt, under NeMo-Gym's id of it. `version` counts its changes."""

    __tablename__ = "captures"
    __table_args__ = (
        CheckConstraint("version >= 0", "not_negative"),
        CheckConstraint("(frozen_at IS NULL) = (snapshot_id IS NULL)", "frozen_has_a_snapshot"),
        CheckConstraint("retired_at IS NULL OR frozen_at IS NOT NULL", "retired_was_frozen"),
    )

    capture_id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(server_default="0")
    incomplete: Mapped[bool] = mapped_column(server_default=text("false"))
    snapshot_id: Mapped[str | None]
    frozen_at: Mapped[datetime | None]
    retired_at: Mapped[datetime | None]


class CapturedCall(Base):
    """One call that was begun; without an entry it never ended, or was not captured."""

    __tablename__ = "captured_calls"
    __table_args__ = (
        ForeignKeyConstraint(
            ["rollout_id", "attempt", "ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
        ),
        CheckConstraint(
            "(entry IS NULL) = (digest IS NULL) AND (entry IS NULL) = (continuation IS NULL)", "entry_is_whole"
        ),
        CheckConstraint(
            "(rollout_id IS NULL) = (attempt IS NULL) AND (attempt IS NULL) = (ordinal IS NULL)", "call_is_whole"
        ),
        Index("captured_calls_capture_id_continuation_idx", "capture_id", "continuation"),
    )

    capture_id: Mapped[str] = mapped_column(ForeignKey("captures.capture_id"), primary_key=True)
    model_call_id: Mapped[str] = mapped_column(primary_key=True)
    entry: Mapped[bytes | None] = mapped_column(LargeBinary)
    digest: Mapped[str | None]
    continuation: Mapped[str | None]
    rollout_id: Mapped[str | None]
    attempt: Mapped[int | None]
    ordinal: Mapped[int | None]
    begun_at: Mapped[Written]
