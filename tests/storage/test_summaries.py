"""The summary of a run built by hand, number by number, and what makes the accounting identity false."""

import pytest
from sqlalchemy import text

from storage.database import Database
from tests.storage.building import Story, selecting

pytestmark = pytest.mark.integration


async def eventful_run(story: Story) -> None:
    """Two applied steps, a dropped, a set aside, a parked, a sealed and an open group, an evaluation; every kind of
    rollout."""
    ledger = story.ledger
    two_valid = await story.sealed_group([1.0, 0.5], step=0, slot=0)
    one_masked = await story.group(step=0, slot=1)
    replaying = one_masked.rollouts[0].rollout_id
    await story.begin(replaying)
    await story.generate(replaying, 0, sampled=range(7), fingerprint="first")
    await ledger.rollouts.fail_attempt(replaying, 0, "agent", "infra", "http_500", "the agent said 500")
    await story.begin(replaying)  # its worker died: the next attempt abandons it
    await story.begin(replaying)
    assert (await ledger.calls.claim(replaying, 2, "first")).recorded
    await story.generate(replaying, 2, sampled=range(3), fingerprint="second")
    await ledger.rollouts.settle(selecting(replaying, 2, [0, 1], reward=0.0))
    await ledger.rollouts.lose(one_masked.rollouts[1].rollout_id, "masked", "by the operator")
    await ledger.groups.set_state(one_masked.group_id, "sealed")
    await story.train([two_valid.group_id, one_masked.group_id], step=0)

    later = await story.sealed_group([0.25], step=1, slot=0)
    dropped = await story.group(step=1, slot=1)
    for rollout in dropped.rollouts:
        await ledger.rollouts.lose(rollout.rollout_id, "lost", "budget used up")
    await ledger.groups.set_state(dropped.group_id, "dropped", "infra", "no valid rollout")
    await story.train([later.group_id], step=1)
    await story.set_aside_group(step=2, slot=3)

    await story.sealed_group([1.0], step=2, slot=0)
    parked = await story.group(step=2, slot=1)
    await ledger.groups.set_state(parked.group_id, "parked", "data", "waits for the operator")
    await story.group(step=2, slot=2, num_rollouts=4)
    evaluated = await story.group(step=2, slot=0, purpose="validation")
    await story.settle(evaluated.rollouts[0].rollout_id, 1.0)

    for version in (0, 1, 2):
        await ledger.weights.publish(await story.lease(), version, f"weights/{version}", "digest")
    for version, endpoint in ((0, "a"), (0, "b"), (1, "a"), (1, "b")):
        await ledger.weights.record_refit(story.run_id, version, endpoint, 0.5)


async def test_summary_counts_what_happened(story: Story) -> None:
    await eventful_run(story)

    summary = await story.ledger.summaries.of(story.run_id)

    assert summary.model_dump() == {
        "run_id": story.run_id,
        "state": "running",
        "steps_applied": 2,
        "refits": 2,
        "policy_version": 1,
        "groups": {
            "dispatched": 8,
            "trained": 3,
            "dropped": 1,
            "set_aside": 1,
            "parked": 1,
            "open": 2,
            "promoted": 0,
            "replaced": 0,
            "refused_late": 0,
        },
        "rollouts": {"dispatched": 16, "valid": 7, "masked": 1, "lost": 2, "open": 6},
        "attempts": {"total": 9, "failed": 2},
        "rows": {"trained": 8, "segments_max": 2},
        "model_calls": {"generated": 14, "replayed": 1},
        "tokens": {"generated": 190, "replayed": 7, "trained": 120},
        "reward_by_step": [0.5, 0.25],
        "identity_holds": True,
    }


async def test_summary_of_a_new_run_is_zeros(story: Story) -> None:
    summary = await story.ledger.summaries.of(story.run_id)

    assert (summary.groups.dispatched, summary.rollouts.dispatched, summary.attempts.total) == (0, 0, 0)
    assert (summary.steps_applied, summary.refits, summary.policy_version, summary.reward_by_step) == (0, 0, 0, [])
    assert summary.identity_holds


@pytest.mark.parametrize(
    "corruption",
    [
        "DELETE FROM rollouts WHERE rollout_id = :rollout_id",
        "INSERT INTO rollouts (rollout_id, group_id, index) VALUES (:rollout_id || '-twin', :group_id, 9)",
        "UPDATE rollouts SET group_id = :other_group_id, index = 9 WHERE rollout_id = :rollout_id",
        "UPDATE attempts SET state = 'abandoned' WHERE rollout_id = :rollout_id",
        "DELETE FROM attempts WHERE rollout_id = :rollout_id",
        "DELETE FROM batches WHERE run_id = :run_id AND step = 1",
        "UPDATE batches SET digest = 'other' WHERE run_id = :run_id AND step = 0",
        "DELETE FROM batch_groups WHERE group_id = :group_id",
        "DELETE FROM optimizer_steps WHERE run_id = :run_id AND step = 1",
        "UPDATE groups SET state = 'dropped', reason = 'gone' WHERE group_id = :group_id",
        "UPDATE batch_groups SET step = 1, position = 7 WHERE group_id = :group_id",
        "DELETE FROM groups WHERE group_id = :group_id",
    ],
)
async def test_identity_is_false_once_a_row_is_corrupt(story: Story, owner: Database, corruption: str) -> None:
    await eventful_run(story)
    group_id = story.group_id(0, 0)

    async with owner.transaction() as session:
        await session.execute(text("SET LOCAL session_replication_role = replica"))  # foreign keys would refuse it
        await session.execute(
            text(corruption),
            {
                name: value
                for name, value in {
                    "run_id": story.run_id,
                    "group_id": group_id,
                    "other_group_id": story.group_id(1, 0),
                    "rollout_id": f"{group_id}/rollout-0",
                }.items()
                if f":{name}" in corruption
            },
        )

    assert not (await story.ledger.summaries.of(story.run_id)).identity_holds
