"""The claim of a model call as one function of the database, because an agent waits for it: one round trip.

Its statements see what was committed before the lock on the rollout's row was granted, so claims of one rollout take
turns, and take turns with the beginning of the next attempt. Its commit is not waited for: a claim that a crash of the
database undoes is missed when the call is recorded or selected, and refused there.
"""

from alembic import op

# The oldest occurrence that earlier attempts recorded and this one does not hold, else the smallest it does not hold.
CLAIM = """
CREATE FUNCTION onbelay_claim(
    claiming text, claiming_attempt int, claimed_fingerprint text,
    OUT state text, OUT current_attempt int, OUT attempt_state text, OUT sample int,
    OUT ordinal int, OUT occurrence int, OUT replayed_from int, OUT replayed_ordinal int
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    SELECT r.state, r.current_attempt, a.state, a.sample INTO state, current_attempt, attempt_state, sample
    FROM rollouts AS r LEFT JOIN attempts AS a ON a.rollout_id = r.rollout_id AND a.attempt = claiming_attempt
    WHERE r.rollout_id = claiming
    FOR NO KEY UPDATE OF r;
    IF state IS DISTINCT FROM 'open' OR current_attempt IS DISTINCT FROM claiming_attempt THEN
        RETURN;
    END IF;
    SELECT c.attempt, c.ordinal, c.occurrence INTO replayed_from, replayed_ordinal, occurrence
    FROM model_calls AS c
    WHERE c.rollout_id = claiming AND c.sample = onbelay_claim.sample AND c.fingerprint = claimed_fingerprint
        AND c.outcome = 'generated' AND c.attempt < claiming_attempt
        AND NOT EXISTS (
            SELECT FROM model_call_leases AS held
            WHERE held.rollout_id = claiming AND held.attempt = claiming_attempt
                AND held.fingerprint = claimed_fingerprint AND held.released_at IS NULL
                AND held.occurrence = c.occurrence
        )
    ORDER BY c.occurrence LIMIT 1;
    IF occurrence IS NULL THEN
        WITH held AS MATERIALIZED (
            SELECT lease.occurrence AS k FROM model_call_leases AS lease
            WHERE lease.rollout_id = claiming AND lease.attempt = claiming_attempt
                AND lease.fingerprint = claimed_fingerprint AND lease.released_at IS NULL
        )
        SELECT min(free.k) INTO occurrence
        FROM generate_series(0, (SELECT count(*)::int FROM held)) AS free(k)
        WHERE free.k NOT IN (SELECT held.k FROM held);
    END IF;
    SELECT 1 + greatest(
        -1,
        (SELECT max(l.ordinal) FROM model_call_leases AS l
         WHERE l.rollout_id = claiming AND l.attempt = claiming_attempt),
        (SELECT max(c.ordinal) FROM model_calls AS c WHERE c.rollout_id = claiming AND c.attempt = claiming_attempt)
    ) INTO ordinal;
    INSERT INTO model_call_leases (rollout_id, attempt, ordinal, sample, fingerprint, occurrence)
    VALUES (claiming, claiming_attempt, onbelay_claim.ordinal, onbelay_claim.sample, claimed_fingerprint,
            onbelay_claim.occurrence);
    IF replayed_from IS NOT NULL THEN
        INSERT INTO model_calls (rollout_id, attempt, ordinal, outcome, sample, fingerprint, occurrence,
                                 prompt_tokens, generated_tokens, replayed_from, replayed_ordinal)
        SELECT c.rollout_id, claiming_attempt, onbelay_claim.ordinal, 'replayed', c.sample, c.fingerprint, c.occurrence,
               c.prompt_tokens, c.generated_tokens, c.attempt, c.ordinal
        FROM model_calls AS c
        WHERE c.rollout_id = claiming AND c.attempt = onbelay_claim.replayed_from
            AND c.ordinal = onbelay_claim.replayed_ordinal;
    END IF;
END
$$
"""


def create_claim() -> None:
    """The function."""
    op.execute(CLAIM)


def drop_claim() -> None:
    """Remove it."""
    op.execute("DROP FUNCTION onbelay_claim(text, int, text)")
