"""Which constraint refused a write: the tables hold the rules, this names the broken one."""

from sqlalchemy.exc import IntegrityError

# The names that the triggers give as if they were constraints.
APPEND_ONLY = "evidence_is_append_only"
FENCE = "attempt_is_current"


def broken_constraint(error: IntegrityError) -> str | None:
    """Name of the violated constraint, as PostgreSQL reports it."""
    return _attribute(error, "constraint_name")


def refused_detail(error: IntegrityError) -> str:
    """PostgreSQL's own sentence about the offending key."""
    return _attribute(error, "detail") or "no detail"


def _attribute(error: IntegrityError, name: str) -> str | None:
    cause = error.orig.__cause__ if error.orig is not None else None
    value = getattr(cause, name, None)
    return value if isinstance(value, str) else None
