"""Batches and optimizer steps: a step trains on one stored batch, a group trains once."""

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from storage.models.base import Base, Count, Written, one_of

OF_THE_STEP = "batch_groups_of_the_step_fkey"


class Batch(Base):
    """What a step trains on, stored before it is trained."""

    __tablename__ = "batches"
    __table_args__ = (
        UniqueConstraint("run_id", "step", "digest"),
        CheckConstraint(
            "step >= 0 AND rows >= 0 AND rollouts >= 0 AND trained_tokens >= 0 AND segments_max >= 0", "not_negative"
        ),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str]
    rows: Mapped[int]
    rollouts: Mapped[int]
    trained_tokens: Mapped[Count]
    segments_max: Mapped[int]
    mean_reward: Mapped[float | None]
    stored_at: Mapped[Written]

    groups: Mapped[list["BatchGroup"]] = relationship(order_by="BatchGroup.position", lazy="raise", viewonly=True)


class BatchGroup(Base):
    """A group of a batch, which trains in the batch's step; `position` is its place in the batch."""

    __tablename__ = "batch_groups"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "step"], ["batches.run_id", "batches.step"]),
        ForeignKeyConstraint(
            ["run_id", "step", "group_id"], ["groups.run_id", "groups.train_step", "groups.group_id"], name=OF_THE_STEP
        ),
        UniqueConstraint("group_id"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    group_id: Mapped[str]


class OptimizerStep(Base):
    """A step that was applied: policy version `step` became `step` + 1."""

    __tablename__ = "optimizer_steps"
    __table_args__ = (
        ForeignKeyConstraint(["run_id", "step", "batch_digest"], ["batches.run_id", "batches.step", "batches.digest"]),
        CheckConstraint("replayed_steps >= 0", "not_negative"),
    )

    run_id: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    batch_digest: Mapped[str]
    replayed_steps: Mapped[int]
    applied_at: Mapped[Written]


class StepMetric(Base):
    """One number of a step, written by the trainer as it applied the step, or by the run afterwards.

    A column of its own type, not JSON: a loss may be NaN, and that is what has to be seen.
    """

    __tablename__ = "step_metrics"
    __table_args__ = (CheckConstraint(one_of("source", "trainer", "run"), "source"),)

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
