"""Quarantines: endpoints that a refit went on without, and when they were taken back.

An endpoint has one open quarantine at most, whichever run's refit began it. Rows stay when it has ended.
"""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from storage.migrations.grants import grant_mutable

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "quarantines",
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("version >= 0", name=op.f("quarantines_not_negative_check")),
        sa.CheckConstraint("btrim(endpoint) <> '' AND btrim(reason) <> ''", name=op.f("quarantines_not_blank_check")),
        sa.CheckConstraint("released_at >= since", name=op.f("quarantines_released_after_check")),
        sa.ForeignKeyConstraint(
            ["run_id", "version"],
            ["policy_versions.run_id", "policy_versions.version"],
            name=op.f("quarantines_run_id_version_fkey"),
        ),
        sa.PrimaryKeyConstraint("endpoint", "since", name=op.f("quarantines_pkey")),
    )
    op.create_index(
        "quarantines_one_open",
        "quarantines",
        ["endpoint"],
        unique=True,
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_index("quarantines_run_id_since_idx", "quarantines", ["run_id", "since"])
    grant_mutable("quarantines")


def downgrade() -> None:
    op.drop_table("quarantines")
