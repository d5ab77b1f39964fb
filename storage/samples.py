"""Which recorded responses a new attempt may replay: those of the sample of the attempt before it, or none.

A new sample begins when an operator or the recipe wants it, when the content was at fault (replaying it would fail
again), and when the recorded responses are of weights too old for the step. The attempt says which. A diagnostic copy
is there to replay: its first attempt takes over what was copied whatever the recipe says, and no age is too old for it.
"""

from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from storage.errors import RecoveryRefused
from storage.records import BegunAttempt, Bucket, Recovery

PREVIOUS = text("""
SELECT attempts.attempt, attempts.sample, attempts.bucket, attempts.failure_class, count(ordinal) AS recorded,
       min(weight_version_min) AS oldest_version, groups.purpose = 'diagnostic' AS diagnostic,
       groups.purpose = 'diagnostic' AND attempts.started_at < groups.created_at AS copied
FROM attempts JOIN rollouts ON rollouts.rollout_id = attempts.rollout_id JOIN groups USING (group_id)
     LEFT JOIN model_calls
     ON model_calls.rollout_id = attempts.rollout_id AND model_calls.sample = attempts.sample AND outcome = 'generated'
WHERE attempts.rollout_id = :rollout_id AND attempts.attempt = :attempt
GROUP BY attempts.rollout_id, attempts.attempt, groups.group_id
""")


@dataclass(frozen=True)
class PreviousAttempt:
    """The attempt before, and what is recorded of its sample. `copied`: it is one of a copy's original."""

    attempt: int
    sample: int
    bucket: Bucket | None
    failure_class: str | None
    recorded: int
    oldest_version: int | None
    diagnostic: bool = False
    copied: bool = False


async def previous_attempt(session: AsyncSession, rollout_id: str, current: int | None) -> PreviousAttempt | None:
    """The current attempt of a rollout, if any began."""
    if current is None:
        return None
    row = (await session.execute(PREVIOUS, {"rollout_id": rollout_id, "attempt": current})).mappings().one()
    return PreviousAttempt(**row)


def next_attempt(
    rollout_id: str,
    before: PreviousAttempt | None,
    recovery: Recovery,
    policy_version: int,
    max_replay_age_versions: int,
    fresh_after: int | None = None,
) -> BegunAttempt:
    """The attempt that follows, or RecoveryRefused when none may. Nothing of attempts up to `fresh_after` is replayed:
    the first attempt after it begins a new sample."""
    if before is None:
        return BegunAttempt(attempt=0, sample=0, recorded=0, fresh_reason=None)
    if recovery == "none":
        raise RecoveryRefused(rollout_id, before.attempt)
    reason = None
    if fresh_after is not None and before.attempt <= fresh_after:
        reason = "an operator asked for a fresh sample"
    elif not before.copied:
        reason = _fresh_reason(before, recovery, policy_version, max_replay_age_versions)
    return BegunAttempt(
        attempt=before.attempt + 1,
        sample=before.sample if reason is None else before.sample + 1,
        recorded=before.recorded if reason is None else 0,
        fresh_reason=reason,
    )


def _fresh_reason(
    before: PreviousAttempt, recovery: Recovery, policy_version: int, max_replay_age_versions: int
) -> str | None:
    if recovery == "fresh":
        return "recovery: fresh"
    if before.bucket == "data":
        return f"after a data failure: {before.failure_class}"
    oldest = before.oldest_version
    if oldest is not None and oldest < policy_version - max_replay_age_versions and not before.diagnostic:
        return (
            f"a recorded response is of policy version {oldest}, the attempt of {policy_version}: more "
            f"than {max_replay_age_versions} apart (rollouts.max_replay_age_versions)"
        )
    return None
