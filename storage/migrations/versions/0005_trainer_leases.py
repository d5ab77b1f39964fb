"""trainer_leases: one trainer at a time writes for a run. The application removes no row: tokens must only rise."""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from storage.migrations.grants import grant_lasting

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "trainer_leases",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("token > 0", name=op.f("trainer_leases_positive_check")),
        sa.CheckConstraint("btrim(holder) <> ''", name=op.f("trainer_leases_not_blank_check")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("trainer_leases_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("trainer_leases_pkey")),
    )
    grant_lasting("trainer_leases")


def downgrade() -> None:
    op.drop_table("trainer_leases")
