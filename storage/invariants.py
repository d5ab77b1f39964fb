"""The invariants of a run's evidence as SQL: each statement finds the rows that break the sentence above it.

`row` names the violated row the way the command line does, `detail` says what is wrong with it. Most of them no code
could break, because constraints and triggers refuse it; they are checked all the same, since a restored or edited
database has no such promise.
"""

from typing import Final

EVIDENCE: Final[dict[str, str]] = {
    "a call carries the sample of its attempt": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'sample ' || model_calls.sample || ', its attempt has ' || coalesce(attempts.sample::text, 'gone') AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    LEFT JOIN attempts
    ON attempts.rollout_id = model_calls.rollout_id AND attempts.attempt = model_calls.attempt
WHERE run_id = :run_id AND model_calls.sample IS DISTINCT FROM attempts.sample
""",
    "a response is generated once in a sample": """
SELECT rollouts.rollout_id || '/sample-' || sample AS row,
    count(*) || ' generations of request ' || fingerprint || ', occurrence ' || occurrence AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
WHERE run_id = :run_id AND outcome = 'generated'
GROUP BY rollouts.rollout_id, sample, fingerprint, occurrence HAVING count(*) > 1
""",
    "a replayed call points to the generated one of its request": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    CASE WHEN source.rollout_id IS NULL THEN 'the generated call is gone'
        ELSE 'the generated call has another outcome, sample, request or size, or is not older' END AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    LEFT JOIN model_calls AS source
    ON source.rollout_id = model_calls.rollout_id AND source.attempt = model_calls.replayed_from
    AND source.ordinal = model_calls.replayed_ordinal
WHERE run_id = :run_id AND model_calls.outcome = 'replayed' AND (
    source.outcome, source.sample, source.fingerprint, source.occurrence, source.prompt_tokens,
    source.generated_tokens, source.attempt < model_calls.attempt
) IS DISTINCT FROM (
    'generated', model_calls.sample, model_calls.fingerprint, model_calls.occurrence, model_calls.prompt_tokens,
    model_calls.generated_tokens, true
)
""",
    "the parent of a call is a generated call of its sample": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'parent: attempt ' || model_calls.parent_attempt || ', call ' || model_calls.parent_ordinal AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    LEFT JOIN model_calls AS parent
    ON parent.rollout_id = model_calls.rollout_id AND parent.attempt = model_calls.parent_attempt
    AND parent.ordinal = model_calls.parent_ordinal
WHERE run_id = :run_id AND model_calls.parent_attempt IS NOT NULL
    AND (parent.outcome, parent.sample) IS DISTINCT FROM ('generated', model_calls.sample)
""",
    "a call that appends starts with all tokens of its parent": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'prefix of ' || model_calls.prefix_tokens || ' tokens, its parent ends with token '
    || parent.prompt_tokens + parent.generated_tokens AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    JOIN model_calls AS parent
    ON parent.rollout_id = model_calls.rollout_id AND parent.attempt = model_calls.parent_attempt
    AND parent.ordinal = model_calls.parent_ordinal
WHERE run_id = :run_id AND model_calls.continuity = 'append'
    AND model_calls.prefix_tokens <> parent.prompt_tokens + parent.generated_tokens
""",
    "weight spans cover the sampled tokens without gaps": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    generated_tokens || ' sampled tokens, spans ' || weight_versions AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    CROSS JOIN LATERAL (
        SELECT bool_and(first = coalesce(before, 0) AND last > first) AND max(last) = generated_tokens AS whole
        FROM (
            SELECT (span->>'start')::int AS first, (span->>'end')::int AS last,
                lag((span->>'end')::int) OVER (ORDER BY place) AS before
            FROM jsonb_array_elements(weight_versions) WITH ORDINALITY AS spans (span, place)
        ) AS spans
    ) AS covered
WHERE run_id = :run_id AND outcome = 'generated' AND whole IS NOT TRUE
""",
    "a payload has its digest": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'digest ' || digest AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
WHERE run_id = :run_id AND outcome = 'generated' AND (
    (blob IS NULL AND digest <> encode(sha256(tokens || log_probs || body), 'hex'))
    OR (blob IS NULL AND prefix_tokens = 0 AND cumulative_digest <> encode(sha256(tokens), 'hex'))
    OR blob <> digest
)
""",
    "a chain digest follows from the parent's and the call's own": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'chain digest ' || model_calls.chain_digest AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    LEFT JOIN model_calls AS parent
    ON parent.rollout_id = model_calls.rollout_id AND parent.attempt = model_calls.parent_attempt
    AND parent.ordinal = model_calls.parent_ordinal
WHERE run_id = :run_id AND model_calls.outcome = 'generated' AND model_calls.chain_digest
    <> encode(sha256(convert_to(coalesce(parent.chain_digest, '') || model_calls.digest, 'UTF8')), 'hex')
""",
    "an answered call holds its lease, a failed one has given it back": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    model_calls.outcome || CASE WHEN lease.rollout_id IS NULL THEN ', without a lease'
    WHEN lease.released_at IS NULL THEN ', the lease is held' ELSE ', the lease was released' END AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    LEFT JOIN model_call_leases AS lease
    ON lease.rollout_id = model_calls.rollout_id AND lease.attempt = model_calls.attempt
    AND lease.ordinal = model_calls.ordinal AND lease.sample = model_calls.sample
    AND lease.fingerprint = model_calls.fingerprint AND lease.occurrence = model_calls.occurrence
WHERE run_id = :run_id AND outcome IN ('generated', 'replayed', 'failed')
    AND (lease.rollout_id IS NULL OR (outcome = 'failed') <> (lease.released_at IS NOT NULL))
""",
    "no attempt records a call after a later one began": """
SELECT model_calls.rollout_id || '/attempt-' || model_calls.attempt || '/call-' || model_calls.ordinal AS row,
    'recorded at ' || model_calls.ended_at || ', the next attempt began at ' || min(later.started_at) AS detail
FROM model_calls JOIN rollouts ON rollouts.rollout_id = model_calls.rollout_id JOIN groups USING (group_id)
    JOIN attempts AS later
    ON later.rollout_id = model_calls.rollout_id AND later.attempt > model_calls.attempt
WHERE run_id = :run_id AND model_calls.ended_at > later.started_at
GROUP BY model_calls.rollout_id, model_calls.attempt, model_calls.ordinal, model_calls.ended_at
""",
}

SETTLEMENTS: Final[dict[str, str]] = {
    "a sample begins with a reason, and only then": """
SELECT attempts.rollout_id || '/attempt-' || attempts.attempt AS row,
    'sample ' || attempts.sample || ' after sample ' || before.sample || ', '
    || coalesce('because: ' || attempts.fresh_reason, 'without a reason') AS detail
FROM attempts JOIN attempts AS before
    ON before.rollout_id = attempts.rollout_id AND before.attempt = attempts.attempt - 1
    JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id JOIN groups USING (group_id)
WHERE run_id = :run_id
    AND attempts.sample <> before.sample + CASE WHEN attempts.fresh_reason IS NULL THEN 0 ELSE 1 END
""",
    "a settled attempt has a seal": """
SELECT rollouts.rollout_id || '/attempt-' || settled_attempt AS row, rollouts.state || ' without a seal' AS detail
FROM rollouts JOIN groups USING (group_id)
    LEFT JOIN seals ON seals.rollout_id = rollouts.rollout_id AND attempt = settled_attempt
WHERE run_id = :run_id AND settled_attempt IS NOT NULL AND attempt IS NULL
""",
    "a seal is of the attempt that settled": """
SELECT rollout_id || '/attempt-' || attempt AS row,
    coalesce('attempt ' || settled_attempt || ' settled', 'no attempt settled') AS detail
FROM seals JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND settled_attempt IS DISTINCT FROM attempt
""",
    "selected responses are of the attempt that settled": """
SELECT rollout_id || '/attempt-' || attempt || '/position-' || position AS row,
    coalesce('attempt ' || settled_attempt || ' settled', 'no attempt settled') AS detail
FROM selected_responses JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND settled_attempt IS DISTINCT FROM attempt
""",
    "a selected response is a response": """
SELECT rollout_id || '/attempt-' || attempt || '/position-' || position AS row,
    'call ' || ordinal || ' is ' || coalesce(outcome, 'gone') AS detail
FROM selected_responses LEFT JOIN model_calls USING (rollout_id, attempt, ordinal)
    JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND coalesce(outcome, 'gone') NOT IN ('generated', 'replayed', 'reported')
""",
    "positions of selected responses have no gaps": """
SELECT rollout_id || '/attempt-' || attempt AS row,
    count(*) || ' selected responses, the last at position ' || max(position) AS detail
FROM selected_responses JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id
GROUP BY rollout_id, attempt HAVING count(*) <> max(position) + 1
""",
    "segments follow one another, and boundaries are where they start": """
SELECT rollout_id || '/attempt-' || attempt || '/position-' || position AS row,
    'segment ' || segment || ' after ' || coalesce(before::text, 'none') || coalesce(', boundary: ' || boundary, '')
    AS detail
FROM (
    SELECT *, lag(segment) OVER (PARTITION BY rollout_id, attempt ORDER BY position) AS before
    FROM selected_responses
) AS selected JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND (
    segment - coalesce(before, 0) NOT IN (0, 1) OR (boundary IS NOT NULL AND segment = coalesce(before, 0))
)
""",
    "a valid rollout has evidence: a digest, and a selected response in each segment": """
SELECT rollout_id AS row, coalesce('evidence ' || evidence_digest, 'no evidence digest') || ', ' || segments
    || ' segments, selected responses in ' || selected AS detail
FROM (
    SELECT rollouts.*, (
        SELECT count(DISTINCT segment) FROM selected_responses AS selected
        WHERE selected.rollout_id = rollouts.rollout_id AND selected.attempt = settled_attempt
    ) AS selected
    FROM rollouts
) AS rollouts JOIN groups USING (group_id)
WHERE run_id = :run_id AND rollouts.state = 'valid'
    AND (evidence_digest IS NULL OR selected = 0 OR selected <> segments)
""",
}

ACCOUNTING: Final[dict[str, str]] = {
    "a group has the rollouts it was opened with": """
SELECT group_id AS row, count(rollout_id) || ' rollouts of ' || num_rollouts AS detail
FROM groups LEFT JOIN rollouts USING (group_id)
WHERE run_id = :run_id
GROUP BY group_id HAVING count(rollout_id) <> num_rollouts
""",
    "a group that ended well has no open rollout": """
SELECT rollout_id AS row, 'open, its group is ' || groups.state AS detail
FROM rollouts JOIN groups USING (group_id)
WHERE run_id = :run_id AND groups.state IN ('sealed', 'set_aside', 'trained') AND rollouts.state = 'open'
""",
    "a group that was set aside has valid rollouts, all with the same reward, and is in no batch": """
SELECT groups.group_id AS row, count(reward) || ' rewards from ' || coalesce(min(reward)::text, 'none') || ' to '
    || coalesce(max(reward)::text, 'none') || CASE WHEN batch_groups.step IS NULL THEN ''
    ELSE ', in the batch of step ' || batch_groups.step END AS detail
FROM groups LEFT JOIN rollouts ON rollouts.group_id = groups.group_id AND rollouts.state = 'valid'
    LEFT JOIN batch_groups ON batch_groups.group_id = groups.group_id
WHERE groups.run_id = :run_id AND groups.state = 'set_aside'
GROUP BY groups.group_id, batch_groups.step
HAVING (min(reward) = max(reward)) IS NOT TRUE OR batch_groups.step IS NOT NULL
""",
    "the attempt that settled a rollout is settled, and no other": """
SELECT rollout_id || '/attempt-' || attempt AS row, attempts.state || ', '
    || coalesce('attempt ' || settled_attempt || ' settled', 'no attempt settled') AS detail
FROM attempts JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND (attempts.state = 'settled') <> (attempt IS NOT DISTINCT FROM settled_attempt)
UNION ALL
SELECT rollouts.rollout_id || '/attempt-' || settled_attempt, 'gone'
FROM rollouts JOIN groups USING (group_id)
    LEFT JOIN attempts ON attempts.rollout_id = rollouts.rollout_id AND attempt = settled_attempt
WHERE run_id = :run_id AND settled_attempt IS NOT NULL AND attempt IS NULL
""",
    "an applied step has the batch it was applied with": """
SELECT run_id || '/step-' || step AS row,
    'applied batch ' || batch_digest || ', stored ' || coalesce(digest, 'none') AS detail
FROM optimizer_steps LEFT JOIN batches USING (run_id, step)
WHERE run_id = :run_id AND digest IS DISTINCT FROM batch_digest
""",
    "a group is trained if an applied step has it in its batch, and only then": """
SELECT coalesce(trained.group_id, applied.group_id) AS row,
    CASE WHEN applied.group_id IS NULL THEN 'trained, but in the batch of no applied step'
    ELSE 'in the batch of an applied step, but not trained' END AS detail
FROM (SELECT group_id FROM groups WHERE run_id = :run_id AND state = 'trained') AS trained
    FULL JOIN (
        SELECT group_id FROM batch_groups JOIN optimizer_steps USING (run_id, step) WHERE run_id = :run_id
    ) AS applied USING (group_id)
WHERE trained.group_id IS NULL OR applied.group_id IS NULL
""",
    "a train group that has ended has its place among the endings, and no other has one": """
SELECT group_id AS row, purpose || ', ' || state || ', ended as ' || coalesce(ended_order::text, 'none') AS detail
FROM groups
WHERE run_id = :run_id
    AND (ended_order IS NOT NULL) <> (purpose = 'train' AND state IN ('sealed', 'dropped', 'set_aside', 'trained'))
""",
    "a group whose place was taken is dropped or set aside, or trains in another step": """
SELECT lost.group_id AS row, lost.state || ' in step ' || lost.train_step || ', replaced by ' || successor.group_id
    AS detail
FROM groups AS lost JOIN groups AS successor ON successor.replaces = lost.group_id
WHERE lost.run_id = :run_id AND lost.state NOT IN ('dropped', 'set_aside') AND lost.train_step = successor.train_step
""",
    "a group takes a place in the step that trains it": """
SELECT successor.group_id AS row, 'trains in step ' || successor.train_step || ', replaces '
    || successor.replaces || coalesce(' of step ' || lost.step, ', which is gone') AS detail
FROM groups AS successor LEFT JOIN groups AS lost ON lost.group_id = successor.replaces
WHERE successor.run_id = :run_id AND successor.replaces IS NOT NULL AND (
    lost.run_id IS DISTINCT FROM successor.run_id OR successor.train_step NOT IN (lost.step, lost.train_step)
)
""",
    "a batch has only groups that train in its step": """
SELECT batch_groups.group_id AS row, 'in the batch of step ' || batch_groups.step || ', '
    || coalesce('trains in step ' || train_step, 'gone') AS detail
FROM batch_groups LEFT JOIN groups ON groups.group_id = batch_groups.group_id
WHERE batch_groups.run_id = :run_id AND train_step IS DISTINCT FROM batch_groups.step
""",
    "an evaluation and a diagnostic copy are in no batch": """
SELECT group_id AS row, purpose || ' group in the batch of step ' || batch_groups.step AS detail
FROM batch_groups JOIN groups USING (group_id)
WHERE batch_groups.run_id = :run_id AND purpose <> 'train'
""",
}
