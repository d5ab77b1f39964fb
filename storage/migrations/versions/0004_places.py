"""Places of groups: the step that trains them, whom they replace, copies, the order of endings; the audit of operators.

Groups that have ended get their order by the time of their last change. A diagnostic copy shares the slot of its
original, so the slot is unique among the other groups only. Where there are copies there is no way back: an earlier
release would count them.
"""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from storage.migrations.grants import grant_append_only
from storage.migrations.rules import make_append_only

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None

APPEND_ONLY = ("operator_actions", "late_refusals")
ORDER = """
UPDATE groups SET ended_order = ended.place
FROM (
    SELECT group_id, row_number() OVER (PARTITION BY run_id ORDER BY updated_at, step, slot) AS place
    FROM groups WHERE purpose = 'train' AND state IN ('sealed', 'dropped', 'trained')
) AS ended
WHERE ended.group_id = groups.group_id
"""


def upgrade() -> None:
    op.add_column("groups", sa.Column("train_step", sa.Integer(), nullable=True))
    op.add_column("groups", sa.Column("replaces", sa.Text(), nullable=True))
    op.add_column("groups", sa.Column("copy_of", sa.Text(), nullable=True))
    op.add_column("groups", sa.Column("ended_order", sa.BigInteger(), nullable=True))
    op.execute("UPDATE groups SET train_step = step")
    op.execute(ORDER)
    op.alter_column("groups", "train_step", nullable=False)
    op.drop_constraint(op.f("groups_purpose_check"), "groups", type_="check")
    op.drop_constraint(op.f("groups_run_id_purpose_step_slot_key"), "groups", type_="unique")
    op.create_unique_constraint(
        op.f("groups_run_id_train_step_group_id_key"), "groups", ["run_id", "train_step", "group_id"]
    )
    op.create_unique_constraint(op.f("groups_run_id_ended_order_key"), "groups", ["run_id", "ended_order"])
    op.create_unique_constraint(op.f("groups_replaces_key"), "groups", ["replaces"])
    op.create_foreign_key(op.f("groups_replaces_fkey"), "groups", "groups", ["replaces"], ["group_id"])
    op.create_foreign_key(op.f("groups_copy_of_fkey"), "groups", "groups", ["copy_of"], ["group_id"])
    op.create_check_constraint(
        op.f("groups_purpose_check"), "groups", "purpose IN ('train', 'validation', 'diagnostic')"
    )
    op.create_check_constraint(op.f("groups_train_step_check"), "groups", "train_step >= 0 AND train_step <= step")
    op.create_check_constraint(
        op.f("groups_promoted_takes_a_place_check"), "groups", "train_step = step OR replaces IS NOT NULL"
    )
    op.create_check_constraint(
        op.f("groups_replaces_check"), "groups", "replaces IS NULL OR (purpose = 'train' AND replaces <> group_id)"
    )
    op.create_check_constraint(
        op.f("groups_diagnostic_is_a_copy_check"), "groups", "(purpose = 'diagnostic') = (copy_of IS NOT NULL)"
    )
    op.create_check_constraint(
        op.f("groups_ended_order_check"),
        "groups",
        "(ended_order IS NOT NULL) = (purpose = 'train' AND state IN ('sealed', 'dropped', 'trained')) "
        "AND ended_order > 0",
    )
    op.create_index(
        "groups_one_per_slot",
        "groups",
        ["run_id", "purpose", "step", "slot"],
        unique=True,
        postgresql_where=sa.text("purpose <> 'diagnostic'"),
    )
    op.create_index("groups_copy_of_idx", "groups", ["copy_of"], postgresql_where=sa.text("copy_of IS NOT NULL"))
    op.drop_constraint(op.f("batch_groups_group_id_fkey"), "batch_groups", type_="foreignkey")
    op.create_foreign_key(
        "batch_groups_of_the_step_fkey",
        "batch_groups",
        "groups",
        ["run_id", "step", "group_id"],
        ["run_id", "train_step", "group_id"],
    )
    op.create_table(
        "operator_actions",
        sa.Column("action_id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("verb", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("arguments", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("outcome IN ('done', 'unchanged', 'refused')", name=op.f("operator_actions_outcome_check")),
        sa.CheckConstraint(
            "btrim(actor) <> '' AND btrim(reason) <> '' AND btrim(verb) <> '' AND btrim(target) <> ''",
            name=op.f("operator_actions_not_blank_check"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("operator_actions_run_id_fkey")),
        sa.PrimaryKeyConstraint("action_id", name=op.f("operator_actions_pkey")),
    )
    op.create_index("operator_actions_run_id_at_idx", "operator_actions", ["run_id", "at"])
    op.create_table(
        "late_refusals",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("asked", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("step >= 0", name=op.f("late_refusals_not_negative_check")),
        sa.CheckConstraint(
            "asked IN ('open', 'sealed', 'parked', 'dropped', 'trained', 'promoted')",
            name=op.f("late_refusals_asked_check"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("late_refusals_run_id_fkey")),
        sa.PrimaryKeyConstraint("run_id", "step", "group_id", "asked", name=op.f("late_refusals_pkey")),
    )
    make_append_only(*APPEND_ONLY)
    grant_append_only(*APPEND_ONLY)


def downgrade() -> None:
    op.drop_table("late_refusals")
    op.drop_table("operator_actions")
    op.drop_constraint("batch_groups_of_the_step_fkey", "batch_groups", type_="foreignkey")
    op.create_foreign_key(op.f("batch_groups_group_id_fkey"), "batch_groups", "groups", ["group_id"], ["group_id"])
    op.drop_index("groups_copy_of_idx", "groups")
    op.drop_index("groups_one_per_slot", "groups")
    op.drop_constraint(op.f("groups_purpose_check"), "groups", type_="check")
    for column in ("ended_order", "copy_of", "replaces", "train_step"):
        op.drop_column("groups", column)
    op.create_check_constraint(op.f("groups_purpose_check"), "groups", "purpose IN ('train', 'validation')")
    op.create_unique_constraint(
        op.f("groups_run_id_purpose_step_slot_key"), "groups", ["run_id", "purpose", "step", "slot"]
    )
