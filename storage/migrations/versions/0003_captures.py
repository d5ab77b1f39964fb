"""NeMo-Gym's token captures."""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from storage.migrations.grants import grant_mutable

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "captures",
        sa.Column("capture_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("incomplete", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=True),
        sa.Column("frozen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("version >= 0", name=op.f("captures_not_negative_check")),
        sa.CheckConstraint(
            "(frozen_at IS NULL) = (snapshot_id IS NULL)", name=op.f("captures_frozen_has_a_snapshot_check")
        ),
        sa.CheckConstraint(
            "retired_at IS NULL OR frozen_at IS NOT NULL", name=op.f("captures_retired_was_frozen_check")
        ),
        sa.PrimaryKeyConstraint("capture_id", name=op.f("captures_pkey")),
    )
    op.create_table(
        "captured_calls",
        sa.Column("capture_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("entry", sa.LargeBinary(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("continuation", sa.Text(), nullable=True),
        sa.Column("rollout_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("ordinal", sa.Integer(), nullable=True),
        sa.Column("begun_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "(entry IS NULL) = (digest IS NULL) AND (entry IS NULL) = (continuation IS NULL)",
            name=op.f("captured_calls_entry_is_whole_check"),
        ),
        sa.CheckConstraint(
            "(rollout_id IS NULL) = (attempt IS NULL) AND (attempt IS NULL) = (ordinal IS NULL)",
            name=op.f("captured_calls_call_is_whole_check"),
        ),
        sa.ForeignKeyConstraint(["capture_id"], ["captures.capture_id"], name=op.f("captured_calls_capture_id_fkey")),
        sa.ForeignKeyConstraint(
            ["rollout_id", "attempt", "ordinal"],
            ["model_calls.rollout_id", "model_calls.attempt", "model_calls.ordinal"],
            name=op.f("captured_calls_rollout_id_attempt_ordinal_fkey"),
        ),
        sa.PrimaryKeyConstraint("capture_id", "model_call_id", name=op.f("captured_calls_pkey")),
    )
    op.create_index("captured_calls_capture_id_continuation_idx", "captured_calls", ["capture_id", "continuation"])
    grant_mutable("captures", "captured_calls")


def downgrade() -> None:
    op.drop_table("captured_calls")
    op.drop_table("captures")
