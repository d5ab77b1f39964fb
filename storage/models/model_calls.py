"""The evidence of a rollout: model calls, the responses that were selected, the seal. Rows are only ever added.

A generated call holds its payload, or the digest of a blob that does; what a replayed one answered with is in the
generated row that it points to. Triggers (see the migrations) refuse rows of an attempt that is not current, and every
change of a row that is there.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, Text, UniqueConstraint, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from storage.models.base import Base, one_of

APPEND_ONLY = {"append_only": True}
GENERATED_ONCE = "model_calls_generated_once"

# Each CHECK says what an outcome has, and that no other outcome has it.
CHECKS = {
    "outcome": one_of("outcome", "generated", "replayed", "failed", "measured", "reported"),
    "not_negative": "ordinal >= 0 AND sample >= 0 AND occurrence >= 0 AND prompt_tokens >= 0 AND generated_tokens >= 0",
    "prefix": "prefix_tokens >= 0 AND prefix_tokens <= prompt_tokens",
    "request": "(outcome IN ('measured', 'reported')) = (fingerprint IS NULL) "
    "AND (fingerprint IS NULL) = (occurrence IS NULL)",
    "generated": "(outcome = 'generated') = (continuity IS NOT NULL) "
    "AND (outcome = 'generated') = (digest IS NOT NULL AND chain_digest IS NOT NULL AND cumulative_digest IS NOT NULL) "
    "AND (outcome = 'generated') = (weight_versions IS NOT NULL) "
    "AND (outcome <> 'generated' OR (generated_tokens > 0 AND response_id IS NOT NULL)) "
    "AND (outcome = 'generated' OR (conversation IS NULL AND weight_version_min IS NULL))",
    "payload": "(outcome = 'generated') = ((tokens IS NULL) = (blob IS NOT NULL)) "
    "AND (tokens IS NULL) = (log_probs IS NULL) AND (tokens IS NULL) = (body IS NULL) "
    "AND (outcome = 'generated' OR blob IS NULL) AND (blob IS NULL OR blob = digest)",
    "payload_size": "octet_length(tokens) = 4 * (prompt_tokens - prefix_tokens + generated_tokens) "
    "AND octet_length(log_probs) = 8 * generated_tokens",
    "continuity": one_of("continuity", "root", "append", "new_segment"),
    "lineage": "(parent_attempt IS NULL) = (parent_ordinal IS NULL) "
    "AND (continuity IS NOT NULL OR parent_attempt IS NULL) "
    "AND (continuity <> 'root' OR parent_attempt IS NULL) AND (continuity <> 'append' OR parent_attempt IS NOT NULL) "
    "AND (continuity = 'append' OR prefix_tokens = 0) AND (continuity <> 'append' OR prefix_tokens > 0)",
    "new_segment_has_reason": "continuity <> 'new_segment' OR continuity_reason IS NOT NULL",
    "replayed": "(outcome = 'replayed') = (replayed_from IS NOT NULL) "
    "AND (replayed_from IS NULL) = (replayed_ordinal IS NULL) AND replayed_from < attempt",
    "failed": "(outcome = 'failed') = (failure_class IS NOT NULL) AND (failure_class IS NULL) = (cause IS NULL) "
    "AND (outcome NOT IN ('failed', 'measured') OR generated_tokens = 0)",
    "weight_versions": "weight_version_min <= weight_version_max "
    "AND (weight_version_min IS NULL) = (weight_version_max IS NULL)",
}


class ModelCall(Base):
    """One request of the agent to the policy model, and what became of it."""

    __tablename__ = "model_calls"
    __table_args__ = (
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
        ForeignKeyConstraint(
            ["rollout_id", "parent_attempt", "parent_ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name="model_calls_parent_fkey",
        ),
        ForeignKeyConstraint(
            ["rollout_id", "replayed_from", "replayed_ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name="model_calls_replayed_fkey",
        ),
        *(CheckConstraint(rule, name) for name, rule in CHECKS.items()),
        Index(
            GENERATED_ONCE,
            "rollout_id",
            "sample",
            "fingerprint",
            "occurrence",
            unique=True,
            postgresql_where=text("outcome = 'generated'"),
        ),
        {"info": APPEND_ONLY},
    )

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    outcome: Mapped[str] = mapped_column(Text)
    sample: Mapped[int]
    fingerprint: Mapped[str | None]
    occurrence: Mapped[int | None]
    parent_attempt: Mapped[int | None]
    parent_ordinal: Mapped[int | None]
    continuity: Mapped[str | None]
    continuity_reason: Mapped[str | None]
    prompt_tokens: Mapped[int] = mapped_column(server_default="0")
    prefix_tokens: Mapped[int] = mapped_column(server_default="0")
    generated_tokens: Mapped[int] = mapped_column(server_default="0")
    tokens: Mapped[bytes | None]
    log_probs: Mapped[bytes | None]
    body: Mapped[bytes | None]
    blob: Mapped[str | None]
    finish_reason: Mapped[str | None]
    response_id: Mapped[str | None]
    weight_versions: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB(none_as_null=True))
    weight_version_min: Mapped[int | None]
    weight_version_max: Mapped[int | None]
    conversation: Mapped[str | None]
    cumulative_digest: Mapped[str | None]
    digest: Mapped[str | None]
    chain_digest: Mapped[str | None]
    replayed_from: Mapped[int | None]
    replayed_ordinal: Mapped[int | None]
    failure_class: Mapped[str | None]
    cause: Mapped[str | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class ModelCallLease(Base):
    """An ordinal that an attempt holds: the k-th occurrence of a request."""

    __tablename__ = "model_call_leases"
    __table_args__ = (
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
        CheckConstraint("ordinal >= 0 AND sample >= 0 AND occurrence >= 0", "not_negative"),
        Index(
            "model_call_leases_held_once",
            "rollout_id",
            "attempt",
            "fingerprint",
            "occurrence",
            unique=True,
            postgresql_where=text("released_at IS NULL"),
        ),
    )

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ordinal: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sample: Mapped[int]
    fingerprint: Mapped[str]
    occurrence: Mapped[int]
    claimed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    released_at: Mapped[datetime | None]


class SelectedResponse(Base):
    """A call that the settled rollout went through."""

    __tablename__ = "selected_responses"
    __table_args__ = (
        ForeignKeyConstraint(
            ["rollout_id", "attempt", "ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
        ),
        UniqueConstraint("rollout_id", "attempt", "ordinal"),
        CheckConstraint("position >= 0 AND segment >= 0 AND segment <= position", "not_negative"),
        CheckConstraint("boundary IS NULL OR segment > 0", "boundary"),
        {"info": APPEND_ONLY},
    )

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ordinal: Mapped[int]
    segment: Mapped[int]
    boundary: Mapped[str | None]


class Seal(Base):
    """What an attempt was settled with: one outcome, for ever."""

    __tablename__ = "seals"
    __table_args__ = (
        ForeignKeyConstraint(["rollout_id", "attempt"], ["attempts.rollout_id", "attempts.attempt"]),
        {"info": APPEND_ONLY},
    )

    rollout_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    receipt: Mapped[str]
    sealed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
