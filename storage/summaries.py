"""The summary of a run, computed from the rows of the ledger at one moment; nothing in it is kept by hand.

Only groups with purpose train count. Generated model calls are those of all attempts, the ones that agents reported
included; replayed ones were answered from the ledger. A failed attempt is one that ended without settling its rollout,
whether it reported a failure or was abandoned (its worker died). `groups.open` are the groups that are neither trained
nor given up nor set aside nor parked, sealed ones included. `groups.promoted` are those that train in an earlier step
than they were opened for, `groups.replaced` those opened in the place of one that was dropped or lent;
`groups.refused_late` counts changes that were asked for after a step had closed.
"""

from pydantic import BaseModel, ConfigDict
from sqlalchemy import RowMapping, text

from storage.database import Database
from storage.errors import UnknownRun
from storage.records import RunState


class Part(BaseModel):
    """Base of the summary's parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupCounts(Part):
    dispatched: int
    trained: int
    dropped: int
    set_aside: int
    parked: int
    open: int
    promoted: int
    replaced: int
    refused_late: int


class RolloutCounts(Part):
    dispatched: int
    valid: int
    masked: int
    lost: int
    open: int


class AttemptCounts(Part):
    total: int
    failed: int


class RowCounts(Part):
    trained: int
    segments_max: int


class ModelCallCounts(Part):
    generated: int
    replayed: int


class TokenCounts(Part):
    generated: int
    replayed: int
    trained: int


class RunSummary(Part):
    """`reward_by_step[t]`: mean reward of the valid rollouts of step t's trained groups; one entry per step."""

    run_id: str
    state: RunState
    steps_applied: int
    refits: int
    policy_version: int
    groups: GroupCounts
    rollouts: RolloutCounts
    attempts: AttemptCounts
    rows: RowCounts
    model_calls: ModelCallCounts
    tokens: TokenCounts
    reward_by_step: list[float]
    identity_holds: bool


RUN = "SELECT state FROM runs WHERE run_id = :run_id"

STEPS = """
SELECT count(*) AS applied, coalesce(sum(rows), 0) AS rows, coalesce(max(segments_max), 0) AS segments_max,
       coalesce(sum(trained_tokens), 0) AS trained_tokens
FROM optimizer_steps LEFT JOIN batches USING (run_id, step) WHERE run_id = :run_id
"""

REFITS = """
SELECT count(DISTINCT version) AS versions, coalesce(max(version), 0) AS newest FROM refits WHERE run_id = :run_id
"""

GROUPS = """
SELECT count(*) AS dispatched,
       count(*) FILTER (WHERE state = 'trained') AS trained,
       count(*) FILTER (WHERE state = 'dropped') AS dropped,
       count(*) FILTER (WHERE state = 'set_aside') AS set_aside,
       count(*) FILTER (WHERE state = 'parked') AS parked,
       count(*) FILTER (WHERE state IN ('open', 'sealed')) AS open,
       count(*) FILTER (WHERE train_step <> step) AS promoted,
       count(*) FILTER (WHERE train_step = step AND replaces IN (
           SELECT group_id FROM groups WHERE run_id = :run_id AND state <> 'set_aside'
       )) AS replaced,
       (SELECT count(*) FROM late_refusals WHERE run_id = :run_id) AS refused_late
FROM groups WHERE run_id = :run_id AND purpose = 'train'
"""

ROLLOUTS = """
SELECT (
           SELECT coalesce(sum(num_rollouts), 0) FROM groups WHERE run_id = :run_id AND purpose = 'train'
       ) AS dispatched,
       count(*) FILTER (WHERE rollouts.state = 'valid') AS valid,
       count(*) FILTER (WHERE rollouts.state = 'masked') AS masked,
       count(*) FILTER (WHERE rollouts.state = 'lost') AS lost,
       count(*) FILTER (WHERE rollouts.state = 'open') AS open
FROM rollouts JOIN groups USING (group_id) WHERE run_id = :run_id AND purpose = 'train'
"""

ATTEMPTS = """
SELECT count(*) AS total, count(*) FILTER (WHERE attempts.state IN ('failed', 'abandoned')) AS failed
FROM attempts JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND purpose = 'train'
"""

MODEL_CALLS = """
SELECT count(*) FILTER (WHERE outcome IN ('generated', 'reported')) AS generated,
       count(*) FILTER (WHERE outcome = 'replayed') AS replayed
FROM model_calls JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND purpose = 'train'
"""

TOKENS = """
SELECT coalesce(sum(generated_tokens) FILTER (WHERE outcome IN ('generated', 'reported')), 0) AS generated,
       coalesce(sum(generated_tokens) FILTER (WHERE outcome = 'replayed'), 0) AS replayed
FROM model_calls JOIN rollouts USING (rollout_id) JOIN groups USING (group_id)
WHERE run_id = :run_id AND purpose = 'train'
"""

REWARDS = """
SELECT avg(reward) AS reward
FROM optimizer_steps JOIN batch_groups USING (run_id, step) JOIN groups USING (group_id) JOIN rollouts USING (group_id)
WHERE optimizer_steps.run_id = :run_id AND groups.state = 'trained' AND rollouts.state = 'valid'
GROUP BY optimizer_steps.step ORDER BY optimizer_steps.step
"""

# What the accounting identity forbids, one EXISTS per sentence:
# a group with other than num_rollouts rollouts, each in one of the four states;
# a trained rollout (valid, in a trained group) that no settled attempt of its own vouches for;
# an applied step without the stored batch it was applied with;
# a trained group that is not in the applied batch of its own step, or a group of an applied batch that is not trained.
BROKEN = """
SELECT EXISTS (
    SELECT FROM groups LEFT JOIN rollouts
           ON rollouts.group_id = groups.group_id AND rollouts.state IN ('valid', 'masked', 'lost', 'open')
    WHERE run_id = :run_id AND purpose = 'train'
    GROUP BY groups.group_id HAVING count(rollout_id) <> num_rollouts
) OR EXISTS (
    SELECT FROM groups JOIN rollouts USING (group_id) LEFT JOIN attempts
           ON attempts.rollout_id = rollouts.rollout_id AND attempt = settled_attempt AND attempts.state = 'settled'
    WHERE run_id = :run_id AND groups.state = 'trained' AND rollouts.state = 'valid' AND attempts.rollout_id IS NULL
) OR EXISTS (
    SELECT FROM optimizer_steps LEFT JOIN batches USING (run_id, step)
    WHERE run_id = :run_id AND digest IS DISTINCT FROM batch_digest
) OR EXISTS (
    SELECT FROM (
               SELECT group_id, train_step AS step FROM groups
               WHERE run_id = :run_id AND purpose = 'train' AND state = 'trained'
           ) AS trained
           FULL JOIN (
               SELECT group_id, step FROM batch_groups JOIN optimizer_steps USING (run_id, step) WHERE run_id = :run_id
           ) AS applied USING (group_id, step)
    WHERE trained.group_id IS NULL OR applied.group_id IS NULL
) AS broken
"""


class Summaries:
    """Count a run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, run_id: str) -> RunSummary:
        """The summary of a run, or UnknownRun."""
        async with self._database.snapshot() as session:

            async def rows(statement: str) -> list[RowMapping]:
                return list((await session.execute(text(statement), {"run_id": run_id})).mappings())

            run = await rows(RUN)
            if not run:
                raise UnknownRun(run_id)
            (steps,) = await rows(STEPS)
            (refits,) = await rows(REFITS)
            groups = GroupCounts.model_validate((await rows(GROUPS))[0])
            rollouts = RolloutCounts.model_validate((await rows(ROLLOUTS))[0])
            attempts = AttemptCounts.model_validate((await rows(ATTEMPTS))[0])
            calls = ModelCallCounts.model_validate((await rows(MODEL_CALLS))[0])
            (tokens,) = await rows(TOKENS)
            rewards = await rows(REWARDS)
            (identity,) = await rows(BROKEN)
        return RunSummary(
            run_id=run_id,
            state=run[0]["state"],
            steps_applied=steps["applied"],
            refits=refits["versions"],
            policy_version=refits["newest"],
            groups=groups,
            rollouts=rollouts,
            attempts=attempts,
            rows=RowCounts(trained=steps["rows"], segments_max=steps["segments_max"]),
            model_calls=calls,
            tokens=TokenCounts(trained=steps["trained_tokens"], **tokens),
            reward_by_step=[row["reward"] for row in rewards],
            identity_holds=not identity["broken"] and _adds_up(groups, rollouts),
        )


def _adds_up(groups: GroupCounts, rollouts: RolloutCounts) -> bool:
    return (
        groups.dispatched == groups.trained + groups.dropped + groups.set_aside + groups.parked + groups.open
        and rollouts.dispatched == rollouts.valid + rollouts.masked + rollouts.lost + rollouts.open
    )
