"""What the metrics of a step are computed from: its rollouts, and what the run has done so far. Read only.

All of it is read at one moment and is as large as the step's batch; no token leaves the ledger. Counters that say "so
far" stop at the step itself where a later step may have been applied already; the others are those of the moment.
"""

from sqlalchemy import RowMapping, text

from storage.database import Database
from storage.records import Record, RolloutState

RECORDED_STEPS_AT_ONCE = 200


class RolloutStatistics(Record):
    """A rollout of a trained group. Turns and tokens are those of its selected responses, `calls` all responses that
    the settling attempt had from the model; `total_tokens` adds up its segments, each as long as its last call."""

    row_index: int
    state: RolloutState
    answered: bool
    truncated: bool
    reward: float | None
    turns: int
    total_tokens: int
    generated_tokens: int
    most_generated_tokens: int
    calls: int
    calls_with_tokens: int
    calls_with_text: int
    poisoned: bool


class RunCounters(Record):
    """What happened in the run. `idle_s` is the time since a group ended or a step was applied, at this moment."""

    committed_groups: int
    dropped_groups: int
    dropped_for_data: int
    dropped_for_infra: int
    dropped_of_step: int
    set_aside_of_step: int
    max_consecutive_infra_drops: int
    open_groups: int
    train_steps: int
    consumed_groups: int
    consumed_rollouts: int
    idle_s: float


class Retries(Record):
    """Attempts of one failure class after which the rollout was tried again. `abandoned`: their worker died."""

    bucket: str
    failure_class: str
    count: int


class BatchStatistics(Record):
    """The stored batch of the step."""

    rows: int
    rollouts: int
    trained_tokens: int
    segments_max: int


class StepStatistics(Record):
    """Everything at one moment. `batch` is None for a step that stored none."""

    batch: BatchStatistics | None
    rollouts: tuple[RolloutStatistics, ...]
    run: RunCounters
    retries: tuple[Retries, ...]


BATCH = "SELECT rows, rollouts, trained_tokens, segments_max FROM batches WHERE run_id = :run_id AND step = :step"

# A replayed call holds the counts of what it answered with; how that continues a conversation is in the generated row.
ROLLOUTS = """
SELECT row_index, rollouts.state, settled_attempt IS NOT NULL AS answered, truncated, reward,
       turns, total_tokens, generated_tokens, most_generated_tokens, calls, calls_with_tokens, calls_with_text,
       rollouts.state = 'masked' AND settled_attempt IS NOT NULL AND rollouts.reason LIKE ANY (:poison) AS poisoned
FROM batch_groups JOIN groups USING (group_id) JOIN rollouts USING (group_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS turns, coalesce(sum(generated_tokens), 0) AS generated_tokens,
           coalesce(max(generated_tokens), 0) AS most_generated_tokens,
           coalesce(sum(prompt_tokens + generated_tokens) FILTER (WHERE ends_segment), 0) AS total_tokens
    FROM (
        SELECT prompt_tokens, generated_tokens,
               lead(selected.position) OVER (PARTITION BY segment ORDER BY selected.position) IS NULL AS ends_segment
        FROM selected_responses AS selected JOIN model_calls AS call USING (rollout_id, attempt, ordinal)
        WHERE selected.rollout_id = rollouts.rollout_id AND selected.attempt = settled_attempt
    ) AS responses
) AS selected
CROSS JOIN LATERAL (
    SELECT count(*) AS calls, count(*) FILTER (WHERE source.continuity = 'append') AS calls_with_tokens,
           count(*) FILTER (WHERE source.continuity IN ('root', 'new_segment')) AS calls_with_text
    FROM model_calls AS call JOIN model_calls AS source
         ON source.rollout_id = call.rollout_id AND source.attempt = coalesce(call.replayed_from, call.attempt)
         AND source.ordinal = coalesce(call.replayed_ordinal, call.ordinal)
    WHERE call.rollout_id = rollouts.rollout_id AND call.attempt = settled_attempt
          AND call.outcome IN ('generated', 'replayed', 'reported')
) AS answered
WHERE batch_groups.run_id = :run_id AND batch_groups.step = :step ORDER BY batch_groups.position, rollouts.index
"""

# What a rollout is masked for when it answered and what it went through cannot be told from its recorded calls.
POISON = ("ambiguous_terminal:%", "missing_terminal_row:%")

# A drop for the infrastructure counts until a group ends well, as in the budgets of the run.
GROUPS = """
WITH ended AS (
    SELECT state, bucket, updated_at, count(*) FILTER (WHERE state <> 'dropped') OVER (ORDER BY ended_order) AS kept
    FROM groups WHERE run_id = :run_id AND ended_order IS NOT NULL
)
SELECT count(*) FILTER (WHERE state <> 'dropped') AS committed_groups,
       count(*) FILTER (WHERE state = 'dropped') AS dropped_groups,
       count(*) FILTER (WHERE state = 'dropped' AND bucket = 'data') AS dropped_for_data,
       count(*) FILTER (WHERE state = 'dropped' AND bucket = 'infra') AS dropped_for_infra,
       coalesce((
           SELECT max(drops) FROM (
               SELECT count(*) FILTER (WHERE state = 'dropped' AND bucket = 'infra') AS drops FROM ended GROUP BY kept
           ) AS streaks
       ), 0) AS max_consecutive_infra_drops,
       coalesce(extract(epoch FROM clock_timestamp() - greatest(max(updated_at), (
           SELECT max(applied_at) FROM optimizer_steps WHERE run_id = :run_id
       ))), 0)::float AS idle_s
FROM ended
"""

OPEN = """
SELECT count(*) FILTER (WHERE state = 'open') AS open_groups,
       count(*) FILTER (WHERE state = 'dropped' AND train_step = :step) AS dropped_of_step,
       count(*) FILTER (WHERE state = 'set_aside' AND train_step = :step) AS set_aside_of_step
FROM groups WHERE run_id = :run_id AND purpose = 'train'
"""

STEPS = """
SELECT count(*) AS train_steps, coalesce(sum(rollouts), 0) AS consumed_rollouts,
       coalesce(sum(groups), 0) AS consumed_groups
FROM optimizer_steps JOIN batches USING (run_id, step) JOIN (
    SELECT run_id, step, count(*) AS groups FROM batch_groups WHERE run_id = :run_id GROUP BY run_id, step
) AS members USING (run_id, step)
WHERE run_id = :run_id AND step <= :step
"""

RETRIES = """
SELECT coalesce(attempts.bucket, 'infra') AS bucket, coalesce(failure_class, 'abandoned') AS failure_class,
       count(*) AS count
FROM attempts JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND purpose = 'train' AND attempts.state IN ('failed', 'abandoned') AND attempt < current_attempt
GROUP BY 1, 2 ORDER BY 1, 2
"""

RECORDED = """
SELECT step, name, value FROM step_metrics WHERE run_id = :run_id AND source = 'run' AND step IN (
    SELECT DISTINCT step FROM step_metrics WHERE run_id = :run_id AND source = 'run' AND step >= :first
    ORDER BY step LIMIT :limit
) ORDER BY step, name
"""


class Statistics:
    """Read what a step was made of."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str, step: int) -> StepStatistics:
        """The statistics of a step of a run, at this moment."""
        asked = {"run_id": run_id, "step": step}
        async with self._database.snapshot() as session:

            async def rows(statement: str, **more: object) -> list[RowMapping]:
                return list((await session.execute(text(statement), {**asked, **more})).mappings())

            batch = await rows(BATCH)
            rollouts = await rows(ROLLOUTS, poison=list(POISON))
            (groups,), (now,), (steps,) = await rows(GROUPS), await rows(OPEN), await rows(STEPS)
            retries = await rows(RETRIES)
        return StepStatistics(
            batch=BatchStatistics.model_validate(batch[0]) if batch else None,
            rollouts=tuple(RolloutStatistics.model_validate(row) for row in rollouts),
            run=RunCounters.model_validate({**groups, **now, **steps}),
            retries=tuple(Retries.model_validate(row) for row in retries),
        )

    async def recorded(self, run_id: str, first: int) -> dict[int, dict[str, float]]:
        """The recorded metrics of the steps from `first` on, oldest first; at most RECORDED_STEPS_AT_ONCE steps."""
        asked = {"run_id": run_id, "first": first, "limit": RECORDED_STEPS_AT_ONCE}
        by_step: dict[int, dict[str, float]] = {}
        async with self._database.snapshot() as session:
            for row in await session.execute(text(RECORDED), asked):
                by_step.setdefault(row.step, {})[row.name] = row.value
        return by_step
