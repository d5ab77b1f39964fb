"""The SQL of model calls: as few statements as possible, because an agent waits for each of them.

Every transaction that locks more than one row locks the rollout's row first, or a lease that nobody waits for while it
holds a rollout; so there are no deadlocks.
"""

from sqlalchemy import text

# Claims of one rollout take turns on its row, and so do claims and the beginning of the next attempt.
LOCK_ROLLOUT = text("""
SELECT rollouts.state, current_attempt, sample, attempts.state AS attempt_state
FROM rollouts LEFT JOIN attempts ON attempts.rollout_id = rollouts.rollout_id AND attempts.attempt = :attempt
WHERE rollouts.rollout_id = :rollout_id
FOR NO KEY UPDATE OF rollouts
""")

# CLAIM, RECORD and FAIL go to the driver itself, with their values in order.
CLAIM = "SELECT * FROM onbelay_claim($1, $2, $3)"

PARENT = text("""
SELECT sample, prompt_tokens + generated_tokens AS tokens, cumulative_digest, chain_digest
FROM model_calls
WHERE rollout_id = :rollout_id AND attempt = :attempt AND ordinal = :ordinal AND outcome = 'generated'
""")

RECORD_VALUES = (
    *("rollout_id", "attempt", "ordinal", "parent_attempt", "parent_ordinal", "continuity", "continuity_reason"),
    *("prompt_tokens", "prefix_tokens", "generated_tokens", "tokens", "log_probs", "body", "blob", "finish_reason"),
    *("response_id", "weight_versions", "weight_version_min", "weight_version_max", "conversation"),
    *("cumulative_digest", "digest", "chain_digest", "started_at"),
)
_COLUMNS = ", ".join(RECORD_VALUES[3:])
_PLACES = ", ".join(f"${place}" for place in range(4, len(RECORD_VALUES) + 1))
RECORD = f"""
WITH lease AS (
    SELECT rollout_id, attempt, ordinal, sample, fingerprint, occurrence FROM model_call_leases
    WHERE rollout_id = $1 AND attempt = $2 AND ordinal = $3 AND released_at IS NULL
    FOR NO KEY UPDATE
)
INSERT INTO model_calls (
    rollout_id, attempt, ordinal, sample, fingerprint, occurrence, outcome, {_COLUMNS}
)
SELECT lease.*, 'generated', {_PLACES}
FROM lease
RETURNING ended_at
"""  # noqa: S608 (names and places of this module only)

FAIL = """
WITH lease AS (
    UPDATE model_call_leases SET released_at = clock_timestamp()
    WHERE rollout_id = $1 AND attempt = $2 AND ordinal = $3 AND released_at IS NULL
    RETURNING rollout_id, attempt, ordinal, sample, fingerprint, occurrence, claimed_at
)
INSERT INTO model_calls
    (rollout_id, attempt, ordinal, sample, fingerprint, occurrence, started_at, outcome, failure_class, cause)
SELECT lease.*, 'failed', $4, $5 FROM lease
RETURNING ended_at
"""

MEASURE = text("""
INSERT INTO model_calls (rollout_id, attempt, ordinal, outcome, sample, prompt_tokens)
SELECT :rollout_id, :attempt, 1 + greatest(
    -1,
    (SELECT max(ordinal) FROM model_call_leases WHERE rollout_id = :rollout_id AND attempt = :attempt),
    (SELECT max(ordinal) FROM model_calls WHERE rollout_id = :rollout_id AND attempt = :attempt)
), 'measured', :sample, :prompt_tokens
""")

LOCK_LEASE = text("""
SELECT FROM model_call_leases WHERE rollout_id = :rollout_id AND attempt = :attempt AND ordinal = :ordinal
FOR NO KEY UPDATE
""")

RELEASE = text("""
UPDATE model_call_leases SET released_at = clock_timestamp()
WHERE rollout_id = :rollout_id AND attempt = :attempt AND ordinal = :ordinal AND released_at IS NULL
    AND NOT EXISTS (
        SELECT FROM model_calls WHERE rollout_id = :rollout_id AND attempt = :attempt AND ordinal = :ordinal
    )
""")

OUTCOME = text("""
SELECT digest, failure_class, ended_at FROM model_calls
WHERE rollout_id = :rollout_id AND attempt = :attempt AND ordinal = :ordinal
""")
