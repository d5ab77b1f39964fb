"""Event-sourced rollouts: model calls with their evidence, leases, selected responses, seals; the application's role.

What the calls of earlier settlements said becomes `reported` calls, selected in their order.
"""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from storage.errors import APPLICATION_ROLE
from storage.migrations.claims import create_claim, drop_claim
from storage.migrations.grants import create_role, grant_append_only, grant_mutable, grant_readable
from storage.migrations.rules import create_rules, drop_rules, fence, make_append_only

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

EVIDENCE = ("model_calls", "selected_responses", "seals")
EARLIER_TABLES = (
    "runs",
    "prompt_claims",
    "groups",
    "rollouts",
    "attempts",
    "batches",
    "batch_groups",
    "optimizer_steps",
    "step_metrics",
    "policy_versions",
    "refits",
    "checkpoints",
    "evaluations",
)
REPORTED = """
INSERT INTO model_calls
    (rollout_id, attempt, ordinal, outcome, sample, prompt_tokens, generated_tokens, finish_reason, response_id)
SELECT rollout_id, attempt, ordinal, 'reported', 0, prompt_tokens, generated_tokens, finish_reason, response_id
FROM earlier_model_calls
"""
SELECTED = """
INSERT INTO selected_responses (rollout_id, attempt, position, ordinal, segment, boundary)
SELECT rollout_id, attempt, ordinal, ordinal, segment,
       CASE WHEN segment > lag(segment) OVER calls THEN 'not recorded' END
FROM earlier_model_calls WINDOW calls AS (PARTITION BY rollout_id, attempt ORDER BY ordinal)
"""
SEALED = """
INSERT INTO seals (rollout_id, attempt, receipt)
SELECT rollout_id, settled_attempt, 'settled before seals were kept' FROM rollouts WHERE settled_attempt IS NOT NULL
"""


def upgrade() -> None:
    create_role()
    op.add_column("attempts", sa.Column("sample", sa.Integer(), server_default="0", nullable=False))
    op.add_column("attempts", sa.Column("fresh_reason", sa.Text(), nullable=True))
    op.drop_constraint(op.f("attempts_not_negative_check"), "attempts", type_="check")
    op.create_check_constraint(
        op.f("attempts_not_negative_check"), "attempts", "attempt >= 0 AND sample >= 0 AND sample <= attempt"
    )
    op.create_check_constraint(
        op.f("attempts_fresh_begins_a_sample_check"), "attempts", "fresh_reason IS NULL OR sample > 0"
    )
    op.rename_table("model_calls", "earlier_model_calls")
    op.execute("ALTER TABLE earlier_model_calls RENAME CONSTRAINT model_calls_pkey TO earlier_model_calls_pkey")
    op.create_table(
        "model_calls",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=True),
        sa.Column("occurrence", sa.Integer(), nullable=True),
        sa.Column("parent_attempt", sa.Integer(), nullable=True),
        sa.Column("parent_ordinal", sa.Integer(), nullable=True),
        sa.Column("continuity", sa.Text(), nullable=True),
        sa.Column("continuity_reason", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("prefix_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("generated_tokens", sa.Integer(), server_default="0", nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=True),
        sa.Column("log_probs", sa.LargeBinary(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("blob", sa.Text(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("weight_versions", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("weight_version_min", sa.Integer(), nullable=True),
        sa.Column("weight_version_max", sa.Integer(), nullable=True),
        sa.Column("conversation", sa.Text(), nullable=True),
        sa.Column("cumulative_digest", sa.Text(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("chain_digest", sa.Text(), nullable=True),
        sa.Column("replayed_from", sa.Integer(), nullable=True),
        sa.Column("replayed_ordinal", sa.Integer(), nullable=True),
        sa.Column("failure_class", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint(
            "(outcome = 'failed') = (failure_class IS NOT NULL) AND (failure_class IS NULL) = (cause IS "
            "NULL) AND (outcome NOT IN ('failed', 'measured') OR generated_tokens = 0)",
            name=op.f("model_calls_failed_check"),
        ),
        sa.CheckConstraint(
            "(outcome = 'generated') = ((tokens IS NULL) = (blob IS NOT NULL)) AND (tokens IS NULL) = "
            "(log_probs IS NULL) AND (tokens IS NULL) = (body IS NULL) AND (outcome = 'generated' OR blob "
            "IS NULL) AND (blob IS NULL OR blob = digest)",
            name=op.f("model_calls_payload_check"),
        ),
        sa.CheckConstraint(
            "(outcome = 'generated') = (continuity IS NOT NULL) AND (outcome = 'generated') = (digest IS "
            "NOT NULL AND chain_digest IS NOT NULL AND cumulative_digest IS NOT NULL) AND (outcome = "
            "'generated') = (weight_versions IS NOT NULL) AND (outcome <> 'generated' OR "
            "(generated_tokens > 0 AND response_id IS NOT NULL)) AND (outcome = 'generated' OR "
            "(conversation IS NULL AND weight_version_min IS NULL))",
            name=op.f("model_calls_generated_check"),
        ),
        sa.CheckConstraint(
            "(outcome = 'replayed') = (replayed_from IS NOT NULL) AND (replayed_from IS NULL) = "
            "(replayed_ordinal IS NULL) AND replayed_from < attempt",
            name=op.f("model_calls_replayed_check"),
        ),
        sa.CheckConstraint(
            "(outcome IN ('measured', 'reported')) = (fingerprint IS NULL) AND (fingerprint IS NULL) = "
            "(occurrence IS NULL)",
            name=op.f("model_calls_request_check"),
        ),
        sa.CheckConstraint(
            "(parent_attempt IS NULL) = (parent_ordinal IS NULL) AND (continuity IS NOT NULL OR "
            "parent_attempt IS NULL) AND (continuity <> 'root' OR parent_attempt IS NULL) AND (continuity "
            "<> 'append' OR parent_attempt IS NOT NULL) AND (continuity = 'append' OR prefix_tokens = 0) "
            "AND (continuity <> 'append' OR prefix_tokens > 0)",
            name=op.f("model_calls_lineage_check"),
        ),
        sa.CheckConstraint(
            "continuity <> 'new_segment' OR continuity_reason IS NOT NULL",
            name=op.f("model_calls_new_segment_has_reason_check"),
        ),
        sa.CheckConstraint(
            "continuity IN ('root', 'append', 'new_segment')", name=op.f("model_calls_continuity_check")
        ),
        sa.CheckConstraint(
            "outcome IN ('generated', 'replayed', 'failed', 'measured', 'reported')",
            name=op.f("model_calls_outcome_check"),
        ),
        sa.CheckConstraint(
            "octet_length(tokens) = 4 * (prompt_tokens - prefix_tokens + generated_tokens) AND "
            "octet_length(log_probs) = 8 * generated_tokens",
            name=op.f("model_calls_payload_size_check"),
        ),
        sa.CheckConstraint(
            "ordinal >= 0 AND sample >= 0 AND occurrence >= 0 AND prompt_tokens >= 0 AND generated_tokens >= 0",
            name=op.f("model_calls_not_negative_check"),
        ),
        sa.CheckConstraint(
            "prefix_tokens >= 0 AND prefix_tokens <= prompt_tokens", name=op.f("model_calls_prefix_check")
        ),
        sa.CheckConstraint(
            "weight_version_min <= weight_version_max AND (weight_version_min IS NULL) = (weight_version_max IS NULL)",
            name=op.f("model_calls_weight_versions_check"),
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            name=op.f("model_calls_rollout_id_attempt_fkey"),
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "parent_attempt", "parent_ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name="model_calls_parent_fkey",
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "replayed_from", "replayed_ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name="model_calls_replayed_fkey",
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "ordinal", name=op.f("model_calls_pkey")),
    )
    op.create_index(
        "model_calls_generated_once",
        "model_calls",
        ["rollout_id", "sample", "fingerprint", "occurrence"],
        unique=True,
        postgresql_where=sa.text("outcome = 'generated'"),
    )
    op.create_table(
        "model_call_leases",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sample", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("occurrence", sa.Integer(), nullable=False),
        sa.Column(
            "claimed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "ordinal >= 0 AND sample >= 0 AND occurrence >= 0", name=op.f("model_call_leases_not_negative_check")
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            name=op.f("model_call_leases_rollout_id_attempt_fkey"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "ordinal", name=op.f("model_call_leases_pkey")),
    )
    op.create_index(
        "model_call_leases_held_once",
        "model_call_leases",
        ["rollout_id", "attempt", "fingerprint", "occurrence"],
        unique=True,
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "selected_responses",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("position", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("boundary", sa.Text(), nullable=True),
        sa.CheckConstraint("boundary IS NULL OR segment > 0", name=op.f("selected_responses_boundary_check")),
        sa.CheckConstraint(
            "position >= 0 AND segment >= 0 AND segment <= position", name=op.f("selected_responses_not_negative_check")
        ),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt", "ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name=op.f("selected_responses_rollout_id_attempt_ordinal_fkey"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "position", name=op.f("selected_responses_pkey")),
        sa.UniqueConstraint(
            "rollout_id", "attempt", "ordinal", name=op.f("selected_responses_rollout_id_attempt_ordinal_key")
        ),
    )
    op.create_table(
        "seals",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("receipt", sa.Text(), nullable=False),
        sa.Column("sealed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            name=op.f("seals_rollout_id_attempt_fkey"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", name=op.f("seals_pkey")),
    )
    op.execute(REPORTED)
    op.execute(SELECTED)
    op.execute(SEALED)
    op.drop_table("earlier_model_calls")
    create_rules()
    create_claim()
    make_append_only(*EVIDENCE)
    fence("model_calls", "model_call_leases", "selected_responses", "seals")
    grant_readable("alembic_version")
    grant_mutable(*EARLIER_TABLES, "model_call_leases")
    grant_append_only(*EVIDENCE)


def downgrade() -> None:
    op.drop_table("seals")
    op.drop_table("selected_responses")
    op.drop_table("model_call_leases")
    op.drop_table("model_calls")
    drop_claim()
    drop_rules()
    for table in (*EARLIER_TABLES, "alembic_version"):
        op.execute(f"REVOKE ALL ON {table} FROM {APPLICATION_ROLE}")
    op.drop_constraint(op.f("attempts_fresh_begins_a_sample_check"), "attempts", type_="check")
    op.drop_constraint(op.f("attempts_not_negative_check"), "attempts", type_="check")
    op.create_check_constraint(op.f("attempts_not_negative_check"), "attempts", "attempt >= 0")
    op.drop_column("attempts", "fresh_reason")
    op.drop_column("attempts", "sample")
    op.create_table(
        "model_calls",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("replayed_from", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "ordinal >= 0 AND segment >= 0 AND prompt_tokens >= 0 AND generated_tokens >= 0",
            name=op.f("model_calls_not_negative_check"),
        ),
        sa.CheckConstraint("replayed_from < attempt", name=op.f("model_calls_replayed_from_an_earlier_attempt_check")),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt"],
            ["attempts.rollout_id", "attempts.attempt"],
            name=op.f("model_calls_rollout_id_attempt_fkey"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "ordinal", name=op.f("model_calls_pkey")),
    )
