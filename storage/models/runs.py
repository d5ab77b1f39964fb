"""Runs and their claims on the dataset: one live run per task queue, no position of the dataset claimed twice."""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, Text, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, Count, Written, one_of

LIVE_RUN_INDEX = "runs_one_live_run_per_task_queue"


class Run(Base):
    """One training job."""

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint(one_of("state", "running", "paused", "completed", "stopped", "failed", "terminated"), "state"),
        CheckConstraint("dataset_rows > 0", "dataset_rows"),
        Index(LIVE_RUN_INDEX, "task_queue", unique=True, postgresql_where=text("state IN ('running', 'paused')")),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    task_queue: Mapped[str]
    state: Mapped[str] = mapped_column(Text, server_default="running")
    reason: Mapped[str | None]
    recipe: Mapped[dict[str, Any]] = mapped_column(JSONB)
    dataset_digest: Mapped[str]
    dataset_rows: Mapped[Count]
    model_digest: Mapped[str]
    created_at: Mapped[Written]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())


class PromptClaim(Base):
    """One row of the dataset, reserved for one slot of one step."""

    __tablename__ = "prompt_claims"
    __table_args__ = (
        CheckConstraint(one_of("purpose", "train", "validation"), "purpose"),
        CheckConstraint("step >= 0 AND slot >= 0 AND position >= 0 AND row_index >= 0", "not_negative"),
        CheckConstraint("purpose = 'train' OR position = slot", "validation_position"),
        Index(
            "prompt_claims_train_position_once",
            "run_id",
            "position",
            unique=True,
            postgresql_where=text("purpose = 'train'"),
        ),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    purpose: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[Count]
    row_index: Mapped[Count]
    prompt_id: Mapped[str]
    claimed_at: Mapped[Written]
