"""Groups that are set aside: a state of its own, for groups whose rewards are all equal.

Where there are such groups there is no way back: an earlier release has no word for them.
"""

# pyright: basic
# (SQLAlchemy leaves the type parameter of columns open)

from collections.abc import Sequence

from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: Sequence[str] | None = None
depends_on: Sequence[str] | None = None


def upgrade() -> None:
    _set_states("'open', 'sealed', 'parked', 'dropped', 'set_aside', 'trained'", "'set_aside', ")
    op.create_check_constraint(
        op.f("groups_set_aside_check"),
        "groups",
        "state <> 'set_aside' OR (purpose = 'train' AND reason IS NOT NULL AND bucket IS NULL AND train_step = step)",
    )


def downgrade() -> None:
    op.drop_constraint(op.f("groups_set_aside_check"), "groups", type_="check")
    _set_states("'open', 'sealed', 'parked', 'dropped', 'trained'", "")


def _set_states(states: str, ended: str) -> None:
    """The checks that name the states of groups; `ended` are more states in which a group has ended."""
    for table, name in (("groups", "state"), ("groups", "ended_order"), ("late_refusals", "asked")):
        op.drop_constraint(op.f(f"{table}_{name}_check"), table, type_="check")
    op.create_check_constraint(op.f("groups_state_check"), "groups", f"state IN ({states})")
    op.create_check_constraint(
        op.f("groups_ended_order_check"),
        "groups",
        f"(ended_order IS NOT NULL) = (purpose = 'train' AND state IN ('sealed', 'dropped', {ended}'trained')) "
        "AND ended_order > 0",
    )
    op.create_check_constraint(op.f("late_refusals_asked_check"), "late_refusals", f"asked IN ({states}, 'promoted')")
