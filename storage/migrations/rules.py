"""The two rules that no constraint can say, as triggers; each migration calls these for the tables it creates.

Append-only: a row that is there is never changed or removed, not even by the owner. Fenced: a row of an attempt is only
added while that attempt is the current one of an open rollout. The shared lock on the rollout's row makes this hold
under concurrency: beginning the next attempt waits for it, and what comes after sees the next attempt.
"""

from alembic import op

APPEND_ONLY = """
CREATE FUNCTION onbelay_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of %: evidence is append-only', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation', CONSTRAINT = 'evidence_is_append_only', TABLE = TG_TABLE_NAME;
END
$$
"""
FENCE = """
CREATE FUNCTION onbelay_fence() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    fenced record;
BEGIN
    SELECT current_attempt, state INTO fenced FROM rollouts WHERE rollout_id = NEW.rollout_id FOR SHARE;
    IF fenced.current_attempt IS DISTINCT FROM NEW.attempt OR fenced.state IS DISTINCT FROM 'open' THEN
        RAISE EXCEPTION 'attempt % of rollout % is fenced', NEW.attempt, NEW.rollout_id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'attempt_is_current', TABLE = TG_TABLE_NAME,
                  DETAIL = format('the rollout is %s, its current attempt is %s', fenced.state, fenced.current_attempt);
    END IF;
    RETURN NEW;
END
$$
"""


def create_rules() -> None:
    """The trigger functions."""
    op.execute(APPEND_ONLY)
    op.execute(FENCE)


def drop_rules() -> None:
    """Remove the trigger functions; their triggers have gone with their tables."""
    op.execute("DROP FUNCTION onbelay_fence()")
    op.execute("DROP FUNCTION onbelay_append_only()")


def make_append_only(*tables: str) -> None:
    """Refuse UPDATE, DELETE and TRUNCATE of these tables."""
    for table in tables:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION onbelay_append_only()"
        )


def fence(*tables: str) -> None:
    """Refuse rows of attempts that are not current; the tables have the columns rollout_id and attempt."""
    for table in tables:
        op.execute(
            f"CREATE TRIGGER {table}_fence BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION onbelay_fence()"
        )
