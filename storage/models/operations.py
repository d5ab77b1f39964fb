"""What operators asked for, and what came too late: rows that are only ever added."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, one_of
from storage.models.model_calls import APPEND_ONLY


class OperatorAction(Base):
    """One request of an operator and what became of it."""

    __tablename__ = "operator_actions"
    __table_args__ = (
        CheckConstraint(one_of("outcome", "done", "unchanged", "refused"), "outcome"),
        CheckConstraint(
            "btrim(actor) <> '' AND btrim(reason) <> '' AND btrim(verb) <> '' AND btrim(target) <> ''", "not_blank"
        ),
        Index("operator_actions_run_id_at_idx", "run_id", "at"),
        {"info": APPEND_ONLY},
    )

    action_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    target: Mapped[str]
    verb: Mapped[str]
    actor: Mapped[str]
    reason: Mapped[str]
    arguments: Mapped[dict[str, Any]] = mapped_column(JSONB)
    outcome: Mapped[str]
    detail: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class LateRefusal(Base):
    """What was asked of a group after its step had closed, or of a step that cannot take the group. Asked again, it is
    the same one. The group need not be in the ledger: opening it may be what was refused."""

    __tablename__ = "late_refusals"
    __table_args__ = (
        CheckConstraint("step >= 0", "not_negative"),
        CheckConstraint(
            one_of("asked", "open", "sealed", "parked", "dropped", "set_aside", "trained", "promoted"), "asked"
        ),
        {"info": APPEND_ONLY},
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    group_id: Mapped[str] = mapped_column(primary_key=True)
    asked: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
