"""Groups: opened once, opened again with what is settled, ended with the counters, promoted or refused."""

import logging

import pytest

from tests.activities.world import World, call, failing
from tests.rollouts.agent_server import answering
from workflows.messages import AssembleBatch, BudgetState, PromoteGroup, SealGroup

pytestmark = pytest.mark.integration


def promotion(world: World, group: str, to_step: int, replaces: str) -> PromoteGroup:
    return PromoteGroup(run_id=world.run_id, group_id=group, to_step=to_step, replaces=replaces)


async def test_new_group_is_open_and_opening_it_twice_is_one_group(world: World) -> None:
    request = world.open_request(num_rollouts=3)
    for _ in range(2):
        opened = await call(world.groups.open_group, request)
        assert (opened.state, opened.settled, opened.last_attempts) == ("open", (), ())
    assert len((await world.ledger.groups.get(request.group_id)).rollouts) == 3


async def test_group_with_another_prompt_in_its_slot_is_refused(world: World) -> None:
    request = world.open_request()
    await call(world.groups.open_group, request)
    failure, _ = await failing(world.groups.open_group, request.model_copy(update={"prompt_id": "other"}))
    assert (failure.failure_class, failure.group_id) == ("GroupConflict", request.group_id)


async def test_replacement_is_opened_in_the_place_of_the_group_that_was_dropped(world: World) -> None:
    dropped, _ = await world.drop_group("data")
    request = world.open_request(slot=1).model_copy(update={"replaces": dropped})
    assert (await call(world.groups.open_group, request)).state == "open"
    assert (await world.ledger.groups.get(request.group_id)).replaces == dropped


async def test_lost_rollout_keeps_its_reason(world: World) -> None:
    group = await world.open_group()
    result = await world.lose(group, 1)
    assert (result.state, result.attempt, result.reason) == ("lost", None, "AgentFailed (agent): HTTP 500")
    assert await world.lose(group, 1) == result


async def test_rollout_that_an_operator_masks_is_masked_and_its_attempt_abandoned(world: World) -> None:
    group = await world.open_group()
    request = world.rollout(group, 1)
    world.agent.reply = answering(500, "away")
    await failing(world.rollouts.run_rollout, request)
    result = await world.lose(group, 1, "masked")
    assert (result.state, result.attempt) == ("masked", 0)
    assert (await world.stored(request)).state == "masked"


@pytest.mark.parametrize("state", ["parked", "dropped"])
async def test_group_that_was_given_up_is_opened_again_with_what_is_settled(world: World, state: str) -> None:
    group = await world.open_group(num_rollouts=3)
    kept = await call(world.rollouts.run_rollout, world.rollout(group, 0))
    await world.lose(group, 1)
    await world.lose(group, 2)
    await world.seal(group, state, "infra")
    stored = await world.ledger.groups.get(group)
    assert (stored.state, stored.bucket, stored.reason) == (state, "infra", f"the reason of {group}")

    opened = await call(world.groups.open_group, world.open_request(num_rollouts=3))
    assert (opened.state, opened.settled, opened.last_attempts) == ("open", (kept,), (0, None, None))
    assert [rollout.state for rollout in (await world.ledger.groups.get(group)).rollouts] == ["valid", "open", "open"]
    assert (await call(world.rollouts.run_rollout, world.rollout(group, 1))).state == "valid"


async def test_sealed_group_stays_sealed_when_it_is_opened_again(world: World) -> None:
    group = await world.run_group(1.0, 0.0)
    opened = await call(world.groups.open_group, world.open_request())
    assert opened.state == "sealed"
    assert [(result.rollout_id, result.reward) for result in opened.settled] == [
        (f"{group}/rollout-0", 1.0),
        (f"{group}/rollout-1", 0.0),
    ]


async def test_group_with_an_open_rollout_is_not_sealed(world: World) -> None:
    group = await world.open_group()
    seal = SealGroup(run_id=world.run_id, group_id=group, state="sealed")
    failure, _ = await failing(world.groups.seal_group, seal)
    assert (failure.failure_class, failure.bucket) == ("IllegalTransition", "data")


async def test_counters_are_those_right_after_the_group(world: World) -> None:
    first, after_first = await world.drop_group("infra", slot=0)
    _, after_second = await world.drop_group("data", slot=1)
    _, after_third = await world.drop_group("infra", slot=2)
    kept = await world.run_group(1.0, slot=3)
    _, by_operator = await world.drop_group(None, slot=4)
    assert after_first == BudgetState(consecutive_drops=1, skipped_prompts=0)
    assert after_second == BudgetState(consecutive_drops=1, skipped_prompts=1)
    assert after_third == BudgetState(consecutive_drops=2, skipped_prompts=1)
    assert await world.seal(kept) == by_operator == BudgetState(consecutive_drops=0, skipped_prompts=1)
    assert await world.seal(first, "dropped", "infra") == after_first, "asked again, they are the same"


async def test_parked_group_has_the_counters_of_the_run(world: World) -> None:
    await world.drop_group("infra", slot=0)
    group = await world.open_group(slot=1, num_rollouts=1)
    await world.lose(group, 0)
    assert await world.seal(group, "parked", "infra") == BudgetState(consecutive_drops=1, skipped_prompts=0)


@pytest.mark.parametrize("state", ["parked", "dropped"])
async def test_log_of_a_group_that_was_given_up_names_prompt_attempts_classes_and_reasons(
    world: World, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = await world.open_group(num_rollouts=2)
    world.agent.reply = answering(503, "tool is away")
    for _ in range(2):
        await failing(world.rollouts.run_rollout, world.rollout(group, 1))
    await world.lose(group, 0)
    await world.lose(group, 1)
    with caplog.at_level(logging.WARNING):
        await world.seal(group, state, "infra")
    (line,) = [record.getMessage() for record in caplog.records if group in record.getMessage()]
    assert line.startswith(f"group {group} of prompt safe-0 is {state} (infra): the reason of {group} | ")
    for attempt in (0, 1):
        assert f"{group}/rollout-1/attempt-{attempt} AgentFailed (agent): " in line
    assert "HTTP 503" in line
    assert "rollout-0 lost;" in line
    assert "\n" not in line


async def test_group_that_is_kept_is_not_worth_a_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        group = await world.run_group(1.0)
    assert not [record for record in caplog.records if group in record.getMessage()]


async def test_sealed_group_of_a_later_step_takes_the_place_of_a_lost_one(world: World) -> None:
    lost, _ = await world.drop_group("infra")
    ready = await world.run_group(1.0, 0.0, step=1)
    request = promotion(world, ready, 0, lost)
    for _ in range(2):
        assert (await call(world.groups.promote_group, request)).refusal is None
    stored = await world.ledger.groups.get(ready)
    assert (stored.step, stored.train_step, stored.replaces) == (1, 0, lost)


async def test_promotion_into_a_step_that_has_its_batch_is_an_answer_and_no_error(world: World) -> None:
    lost, _ = await world.drop_group("infra")
    trained = await world.run_group(1.0, 0.0, slot=1)
    await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(trained,)))
    ready = await world.run_group(1.0, 0.0, step=1)
    refusal = (await call(world.groups.promote_group, promotion(world, ready, 0, lost))).refusal
    assert refusal is not None
    assert "Step 0" in refusal
    assert (await world.ledger.groups.get(ready)).train_step == 1
    assert (await world.ledger.summaries.of(world.run_id)).groups.refused_late == 1


async def test_group_that_is_not_ready_is_not_promoted(world: World) -> None:
    lost, _ = await world.drop_group("infra")
    group = await world.open_group(step=1)
    refusal = (await call(world.groups.promote_group, promotion(world, group, 0, lost))).refusal
    assert refusal is not None
    assert "only a sealed group is promoted" in refusal


async def test_promotion_of_an_unknown_group_names_it(world: World) -> None:
    lost, _ = await world.drop_group("infra")
    failure, _ = await failing(world.groups.promote_group, promotion(world, f"{world.run_id}/nothing", 0, lost))
    assert (failure.failure_class, failure.bucket) == ("UnknownGroup", "data")


async def test_drop_after_the_step_has_closed_is_refused(world: World) -> None:
    late = await world.open_group(slot=1, num_rollouts=1)
    await world.lose(late, 0)
    trained = await world.run_group(1.0, 0.0)
    await call(world.writing.assemble_batch, AssembleBatch(run_id=world.run_id, step=0, group_ids=(trained,)))
    drop = SealGroup(run_id=world.run_id, group_id=late, state="dropped", bucket="infra", reason="late")
    failure, error = await failing(world.groups.seal_group, drop)
    assert (failure.failure_class, failure.bucket, error.non_retryable) == ("StepClosed", "data", True)
