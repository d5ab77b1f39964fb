"""The tables refuse what no code should write: the fence and the accounting do not depend on the ledger's code."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from storage.constraints import broken_constraint
from storage.database import Database
from tests.storage.building import Story

pytestmark = pytest.mark.integration

ROLLOUT = "UPDATE rollouts SET {} WHERE rollout_id = :rollout_id"
GROUP = "UPDATE groups SET {} WHERE group_id = :group_id"


@pytest.mark.parametrize(
    ("write", "constraint"),
    [
        (ROLLOUT.format("state = 'won', settled_at = now()"), "rollouts_state_check"),
        (ROLLOUT.format("current_attempt = 7"), "rollouts_current_attempt_fkey"),
        (ROLLOUT.format("settled_attempt = 0"), "rollouts_only_the_current_attempt_settles_check"),
        (ROLLOUT.format("state = 'lost', settled_at = now()"), "rollouts_given_up_with_reason_check"),
        (ROLLOUT.format("state = 'valid', settled_at = now()"), "rollouts_valid_has_evidence_check"),
        (ROLLOUT.format("state = 'masked', reason = 'x'"), "rollouts_settled_at_check"),
        ("INSERT INTO attempts (rollout_id, attempt, worker) VALUES (:rollout_id, 2, 'w')", "attempts_one_running"),
        ("UPDATE attempts SET state = 'failed', ended_at = now()", "attempts_failed_with_cause_check"),
        (GROUP.format("state = 'parked'"), "groups_given_up_with_reason_check"),
        (GROUP.format("state = 'dropped', reason = 'x'"), "groups_ended_order_check"),
        (GROUP.format("state = 'set_aside', reason = 'x'"), "groups_ended_order_check"),
        (GROUP.format("state = 'set_aside', ended_order = 1"), "groups_set_aside_check"),
        (GROUP.format("state = 'set_aside', ended_order = 1, reason = 'x', bucket = 'data'"), "groups_set_aside_check"),
        (GROUP.format("state = 'set_aside', purpose = 'validation', reason = 'x'"), "groups_set_aside_check"),
        (GROUP.format("ended_order = 1"), "groups_ended_order_check"),
        (GROUP.format("state = 'sealed', ended_order = 0"), "groups_ended_order_check"),
        (GROUP.format("state = 'trained', purpose = 'validation'"), "groups_validation_never_trains_check"),
        (
            GROUP.format("state = 'trained', purpose = 'diagnostic', copy_of = group_id"),
            "groups_validation_never_trains_check",
        ),
        (GROUP.format("purpose = 'diagnostic'"), "groups_diagnostic_is_a_copy_check"),
        (GROUP.format("copy_of = group_id"), "groups_diagnostic_is_a_copy_check"),
        (GROUP.format("copy_of = 'nowhere', purpose = 'diagnostic'"), "groups_copy_of_fkey"),
        (GROUP.format("train_step = step + 1, replaces = 'another'"), "groups_train_step_check"),
        (GROUP.format("train_step = step - 1"), "groups_promoted_takes_a_place_check"),
        (GROUP.format("train_step = -1, replaces = 'another'"), "groups_train_step_check"),
        (GROUP.format("replaces = group_id"), "groups_replaces_check"),
        (GROUP.format("replaces = 'another', purpose = 'validation'"), "groups_replaces_check"),
        (GROUP.format("replaces = 'nowhere'"), "groups_replaces_fkey"),
    ],
)
async def test_write_is_refused_by_its_constraint(
    story: Story, database: Database, write: str, constraint: str
) -> None:
    group = await story.group(step=3)
    rollout_id = group.rollouts[0].rollout_id
    await story.begin(rollout_id)
    await story.begin(rollout_id)
    known = {"rollout_id": rollout_id, "group_id": group.group_id}

    async with database.transaction() as session:
        statement = text(write)
        with pytest.raises(IntegrityError) as refused:
            await session.execute(statement, {name: known[name] for name in known if f":{name}" in write})
        await session.rollback()

    assert (broken_constraint(refused.value) or "").startswith(constraint)
