"""The first tables of the ledger."""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0001"
down_revision: str | None = None
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("task_queue", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="running", nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("recipe", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("dataset_digest", sa.Text(), nullable=False),
        sa.Column("dataset_rows", sa.BigInteger(), nullable=False),
        sa.Column("model_digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "state IN ('running', 'paused', 'completed', 'stopped', 'failed', 'terminated')",
            name=op.f("runs_state_check"),
        ),
        sa.CheckConstraint("dataset_rows > 0", name=op.f("runs_dataset_rows_check")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("runs_pkey")),
    )
    op.create_index(
        "runs_one_live_run_per_task_queue",
        "runs",
        ["task_queue"],
        unique=True,
        postgresql_where=sa.text("state IN ('running', 'paused')"),
    )
    op.create_table(
        "batches",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("rollouts", sa.Integer(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("segments_max", sa.Integer(), nullable=False),
        sa.Column("mean_reward", sa.Double(), nullable=True),
        sa.Column("stored_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "step >= 0 AND rows >= 0 AND rollouts >= 0 AND trained_tokens >= 0 AND segments_max >= 0",
            name=op.f("batches_not_negative_check"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("batches_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("batches_pkey")),
        sa.UniqueConstraint("run_id", "step", "digest", name=op.f("batches_run_id_step_digest_key")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("version >= 0", name=op.f("checkpoints_not_negative_check")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("checkpoints_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("checkpoints_pkey")),
    )
    op.create_table(
        "evaluations",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("mean_reward", sa.Double(), nullable=True),
        sa.Column("rollouts", sa.Integer(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("version >= 0 AND rollouts >= 0", name=op.f("evaluations_not_negative_check")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("evaluations_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("evaluations_pkey")),
    )
    op.create_table(
        "groups",
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("prompt_id", sa.Text(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("num_rollouts", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("bucket", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("bucket IN ('infra', 'data')", name=op.f("groups_bucket_check")),
        sa.CheckConstraint("purpose IN ('train', 'validation')", name=op.f("groups_purpose_check")),
        sa.CheckConstraint(
            "state <> 'trained' OR purpose = 'train'", name=op.f("groups_validation_never_trains_check")
        ),
        sa.CheckConstraint(
            "state IN ('open', 'sealed', 'parked', 'dropped', 'trained')", name=op.f("groups_state_check")
        ),
        sa.CheckConstraint(
            "state NOT IN ('parked', 'dropped') OR reason IS NOT NULL", name=op.f("groups_given_up_with_reason_check")
        ),
        sa.CheckConstraint(
            "num_rollouts > 0 AND step >= 0 AND slot >= 0 AND row_index >= 0", name=op.f("groups_not_negative_check")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("groups_run_id_fkey")),
        sa.PrimaryKeyConstraint("group_id", name=op.f("groups_pkey")),
        sa.UniqueConstraint("run_id", "purpose", "step", "slot", name=op.f("groups_run_id_purpose_step_slot_key")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("version >= 0", name=op.f("policy_versions_not_negative_check")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("policy_versions_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("policy_versions_pkey")),
    )
    op.create_table(
        "prompt_claims",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("prompt_id", sa.Text(), nullable=False),
        sa.Column("claimed_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "purpose = 'train' OR position = slot", name=op.f("prompt_claims_validation_position_check")
        ),
        sa.CheckConstraint("purpose IN ('train', 'validation')", name=op.f("prompt_claims_purpose_check")),
        sa.CheckConstraint(
            "step >= 0 AND slot >= 0 AND position >= 0 AND row_index >= 0",
            name=op.f("prompt_claims_not_negative_check"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("prompt_claims_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "purpose", "step", "slot", name=op.f("prompt_claims_pkey")),
    )
    op.create_index(
        "prompt_claims_train_position_once",
        "prompt_claims",
        ["run_id", "position"],
        unique=True,
        postgresql_where=sa.text("purpose = 'train'"),
    )
    op.create_table(
        "step_metrics",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.CheckConstraint("source IN ('trainer', 'run')", name=op.f("step_metrics_source_check")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("step_metrics_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "step", "source", "name", name=op.f("step_metrics_pkey")),
    )
    op.create_table(
        "batch_groups",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name=op.f("batch_groups_group_id_fkey")),
        sa.ForeignKeyConstraint(
            ["run_id", "step"], ["batches.run_id", "batches.step"], name=op.f("batch_groups_run_id_step_fkey")
        ),
        sa.PrimaryKeyConstraint("run_id", "step", "position", name=op.f("batch_groups_pkey")),
        sa.UniqueConstraint("group_id", name=op.f("batch_groups_group_id_key")),
    )
    op.create_table(
        "optimizer_steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("batch_digest", sa.Text(), nullable=False),
        sa.Column("replayed_steps", sa.Integer(), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("replayed_steps >= 0", name=op.f("optimizer_steps_not_negative_check")),
        sa.ForeignKeyConstraint(
            ["run_id", "step", "batch_digest"],
            ["batches.run_id", "batches.step", "batches.digest"],
            name=op.f("optimizer_steps_run_id_step_batch_digest_fkey"),
        ),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("optimizer_steps_pkey")),
    )
    op.create_table(
        "refits",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("refitted_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("seconds >= 0", name=op.f("refits_not_negative_check")),
        sa.ForeignKeyConstraint(
            ["run_id", "version"],
            ["policy_versions.run_id", "policy_versions.version"],
            name=op.f("refits_run_id_version_fkey"),
        ),
        sa.PrimaryKeyConstraint("run_id", "version", "endpoint", name=op.f("refits_pkey")),
    )
    op.create_table(
        "rollouts",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("current_attempt", sa.Integer(), nullable=True),
        sa.Column("settled_attempt", sa.Integer(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("truncated", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("policy_version_min", sa.Integer(), nullable=True),
        sa.Column("policy_version_max", sa.Integer(), nullable=True),
        sa.Column("evidence_digest", sa.Text(), nullable=True),
        sa.Column("segments", sa.Integer(), server_default="0", nullable=False),
        sa.Column("settled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'open') = (settled_at IS NULL)", name=op.f("rollouts_settled_at_check")),
        sa.CheckConstraint(
            "state <> 'valid' OR (settled_attempt IS NOT NULL AND reward IS NOT NULL AND evidence_digest IS NOT NULL)",
            name=op.f("rollouts_valid_has_evidence_check"),
        ),
        sa.CheckConstraint("state IN ('open', 'valid', 'masked', 'lost')", name=op.f("rollouts_state_check")),
        sa.CheckConstraint(
            "state NOT IN ('masked', 'lost') OR reason IS NOT NULL", name=op.f("rollouts_given_up_with_reason_check")
        ),
        sa.CheckConstraint(
            "state NOT IN ('open', 'lost') OR settled_attempt IS NULL", name=op.f("rollouts_settled_attempt_check")
        ),
        sa.CheckConstraint("policy_version_min <= policy_version_max", name=op.f("rollouts_policy_versions_check")),
        sa.CheckConstraint(
            "settled_attempt IS NULL OR (current_attempt IS NOT NULL AND settled_attempt = current_attempt)",
            name=op.f("rollouts_only_the_current_attempt_settles_check"),
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.group_id"], name=op.f("rollouts_group_id_fkey")),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("rollouts_pkey")),
        sa.UniqueConstraint("group_id", "index", name=op.f("rollouts_group_id_index_key")),
    )
    op.create_table(
        "attempts",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.Text(), server_default="running", nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("boundary", sa.Text(), nullable=True),
        sa.Column("bucket", sa.Text(), nullable=True),
        sa.Column("failure_class", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state = 'failed') = (boundary IS NOT NULL AND bucket IS NOT NULL AND failure_class IS NOT NULL "
            "AND cause IS NOT NULL)",
            name=op.f("attempts_failed_with_cause_check"),
        ),
        sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name=op.f("attempts_ended_at_check")),
        sa.CheckConstraint(
            "boundary IN ('agent', 'environment', 'model', 'ledger', 'trainer', 'generation')",
            name=op.f("attempts_boundary_check"),
        ),
        sa.CheckConstraint("bucket IN ('infra', 'data')", name=op.f("attempts_bucket_check")),
        sa.CheckConstraint("state IN ('running', 'settled', 'failed', 'abandoned')", name=op.f("attempts_state_check")),
        sa.CheckConstraint("attempt >= 0", name=op.f("attempts_not_negative_check")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], name=op.f("attempts_rollout_id_fkey")),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", name=op.f("attempts_pkey")),
    )
    op.create_index(
        "attempts_one_running_per_rollout",
        "attempts",
        ["rollout_id"],
        unique=True,
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_foreign_key(
        "rollouts_current_attempt_fkey",
        "rollouts",
        "attempts",
        ["rollout_id", "current_attempt"],
        ["rollout_id", "attempt"],
    )
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


def downgrade() -> None:
    op.drop_table("model_calls")
    op.drop_constraint("rollouts_current_attempt_fkey", "rollouts", type_="foreignkey")
    op.drop_table("attempts")
    op.drop_table("rollouts")
    op.drop_table("refits")
    op.drop_table("optimizer_steps")
    op.drop_table("batch_groups")
    op.drop_table("step_metrics")
    op.drop_table("prompt_claims")
    op.drop_table("policy_versions")
    op.drop_table("groups")
    op.drop_table("evaluations")
    op.drop_table("checkpoints")
    op.drop_table("batches")
    op.drop_table("runs")
