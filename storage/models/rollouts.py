"""Groups, rollouts, attempts. The fence is in the tables: a rollout has one current attempt, at most one
attempt runs, and only the current attempt can be the one that settled. So are the places of groups: one group for a
slot, one successor for a group, one place in the order in which the groups of a run ended."""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, Text, UniqueConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from storage.models.base import Base, Count, Written, one_of


class Group(Base):
    """One prompt and its rollouts.

    `train_step` is the step that trains it, earlier than `step` once it was promoted; `replaces` the group whose place
    it took; `copy_of` the original of a diagnostic copy; `ended_order` its place among the groups that have ended.
    """

    __tablename__ = "groups"
    __table_args__ = (
        UniqueConstraint("run_id", "train_step", "group_id"),
        UniqueConstraint("run_id", "ended_order"),
        UniqueConstraint("replaces"),
        CheckConstraint(one_of("purpose", "train", "validation", "diagnostic"), "purpose"),
        CheckConstraint(one_of("state", "open", "sealed", "parked", "dropped", "set_aside", "trained"), "state"),
        CheckConstraint(one_of("bucket", "infra", "data"), "bucket"),
        CheckConstraint("state NOT IN ('parked', 'dropped') OR reason IS NOT NULL", "given_up_with_reason"),
        CheckConstraint("state <> 'trained' OR purpose = 'train'", "validation_never_trains"),
        CheckConstraint(
            "state <> 'set_aside' OR (purpose = 'train' AND reason IS NOT NULL AND bucket IS NULL "
            "AND train_step = step)",
            "set_aside",
        ),
        CheckConstraint("num_rollouts > 0 AND step >= 0 AND slot >= 0 AND row_index >= 0", "not_negative"),
        CheckConstraint("train_step >= 0 AND train_step <= step", "train_step"),
        CheckConstraint("train_step = step OR replaces IS NOT NULL", "promoted_takes_a_place"),
        CheckConstraint("replaces IS NULL OR (purpose = 'train' AND replaces <> group_id)", "replaces"),
        CheckConstraint("(purpose = 'diagnostic') = (copy_of IS NOT NULL)", "diagnostic_is_a_copy"),
        CheckConstraint(
            "(ended_order IS NOT NULL) = (purpose = 'train' "
            "AND state IN ('sealed', 'dropped', 'set_aside', 'trained')) AND ended_order > 0",
            "ended_order",
        ),
        Index(
            "groups_one_per_slot",
            "run_id",
            "purpose",
            "step",
            "slot",
            unique=True,
            postgresql_where=text("purpose <> 'diagnostic'"),
        ),
        Index("groups_copy_of_idx", "copy_of", postgresql_where=text("copy_of IS NOT NULL")),
    )

    group_id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.run_id"))
    step: Mapped[int]
    slot: Mapped[int]
    purpose: Mapped[str]
    prompt_id: Mapped[str]
    row_index: Mapped[Count]
    num_rollouts: Mapped[int]
    state: Mapped[str] = mapped_column(Text, server_default="open")
    bucket: Mapped[str | None]
    reason: Mapped[str | None]
    train_step: Mapped[int]
    replaces: Mapped[str | None] = mapped_column(ForeignKey("groups.group_id"))
    copy_of: Mapped[str | None] = mapped_column(ForeignKey("groups.group_id"))
    ended_order: Mapped[Count | None]
    created_at: Mapped[Written]
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())

    rollouts: Mapped[list["Rollout"]] = relationship(order_by="Rollout.index", lazy="raise", viewonly=True)


class Rollout(Base):
    """One logical rollout: open until it is valid, masked or lost."""

    __tablename__ = "rollouts"
    __table_args__ = (
        UniqueConstraint("group_id", "index"),
        ForeignKeyConstraint(
            ["rollout_id", "current_attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            name="rollouts_current_attempt_fkey",
            use_alter=True,
        ),
        CheckConstraint(one_of("state", "open", "valid", "masked", "lost"), "state"),
        CheckConstraint(
            "settled_attempt IS NULL OR (current_attempt IS NOT NULL AND settled_attempt = current_attempt)",
            "only_the_current_attempt_settles",
        ),
        CheckConstraint("(state = 'open') = (settled_at IS NULL)", "settled_at"),
        CheckConstraint("state NOT IN ('open', 'lost') OR settled_attempt IS NULL", "settled_attempt"),
        CheckConstraint(
            "state <> 'valid' OR (settled_attempt IS NOT NULL AND reward IS NOT NULL AND evidence_digest IS NOT NULL)",
            "valid_has_evidence",
        ),
        CheckConstraint("state NOT IN ('masked', 'lost') OR reason IS NOT NULL", "given_up_with_reason"),
        CheckConstraint("policy_version_min <= policy_version_max", "policy_versions"),
    )

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.group_id"))
    index: Mapped[int]
    state: Mapped[str] = mapped_column(Text, server_default="open")
    current_attempt: Mapped[int | None]
    settled_attempt: Mapped[int | None]
    reward: Mapped[float | None]
    truncated: Mapped[bool] = mapped_column(server_default=text("false"))
    reason: Mapped[str | None]
    policy_version_min: Mapped[int | None]
    policy_version_max: Mapped[int | None]
    evidence_digest: Mapped[str | None]
    segments: Mapped[int] = mapped_column(server_default="0")
    settled_at: Mapped[datetime | None]

    attempts: Mapped[list["Attempt"]] = relationship(
        order_by="Attempt.attempt", foreign_keys="Attempt.rollout_id", lazy="raise", viewonly=True
    )


class Attempt(Base):
    """One try at a rollout."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint("attempt >= 0 AND sample >= 0 AND sample <= attempt", "not_negative"),
        CheckConstraint("fresh_reason IS NULL OR sample > 0", "fresh_begins_a_sample"),
        CheckConstraint(one_of("state", "running", "settled", "failed", "abandoned"), "state"),
        CheckConstraint(
            one_of("boundary", "agent", "environment", "model", "ledger", "trainer", "generation"), "boundary"
        ),
        CheckConstraint(one_of("bucket", "infra", "data"), "bucket"),
        CheckConstraint("(state = 'running') = (ended_at IS NULL)", "ended_at"),
        CheckConstraint(
            "(state = 'failed') = (boundary IS NOT NULL AND bucket IS NOT NULL AND failure_class IS NOT NULL "
            "AND cause IS NOT NULL)",
            "failed_with_cause",
        ),
        Index(
            "attempts_one_running_per_rollout", "rollout_id", unique=True, postgresql_where=text("state = 'running'")
        ),
    )

    rollout_id: Mapped[str] = mapped_column(ForeignKey("rollouts.rollout_id"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(Text, server_default="running")
    worker: Mapped[str]
    sample: Mapped[int] = mapped_column(server_default="0")
    fresh_reason: Mapped[str | None]
    boundary: Mapped[str | None]
    bucket: Mapped[str | None]
    failure_class: Mapped[str | None]
    cause: Mapped[str | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
