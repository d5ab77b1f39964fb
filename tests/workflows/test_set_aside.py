"""Groups without a signal: set aside, their places filled with the next prompts, bounded, known to a resumed run."""

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from activities.errors import AgentFailed, IntegrityError
from tests.workflows.building import (
    asked,
    details_of,
    evaluation_input,
    group_id,
    group_input,
    policy,
    rollout_id,
    root_cause,
    run_input,
    start_group,
    start_run,
    start_step,
    step_input,
    until_closed,
    until_ended,
    until_parked,
    until_shown,
)
from tests.workflows.fake_run import FakeRun, Masked, Outcome, Valid
from tests.workflows.test_training_step import fail_group, group_states
from workflows.evaluation import Evaluation
from workflows.group_levers import GroupFacts, decide
from workflows.messages import BudgetState, RunPolicy, StepInput
from workflows.requests import DropGroup, LeverDone, MaskRollouts, RetryDroppedGroup, RetryGroup
from workflows.search_attributes import GROUP_STATE
from workflows.training_step import TrainingStep

DATA = IntegrityError("tokens contradict themselves")
INFRA = AgentFailed("HTTP 500")


def dynamic(prompts: int = 2, batches: int = 10, grpo: dict[str, Any] | None = None, **keys: Any) -> RunPolicy:
    """A policy of groups of two that samples dynamically."""
    chosen = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": batches, **(grpo or {})}
    return policy(prompts=prompts, grpo=chosen, **keys)


def equal(run: FakeRun, slot: int, reward: float = 1.0, step: int = 0) -> None:
    """Both rollouts of a group get this reward."""
    for index in range(2):
        run.script[rollout_id(run, index, slot, step)] = [Valid(reward)]


async def exhausted(client: Client, step: StepInput) -> str:
    """Why the step ended the run: it sampled as many groups as it may."""
    with pytest.raises(WorkflowFailureError) as caught:
        await (await start_step(client, step)).result()
    cause = root_cause(caught.value)
    assert isinstance(cause, ApplicationError)
    assert (cause.type, cause.non_retryable) == ("SamplingExhausted", True)
    return str(cause)


async def test_a_group_without_a_signal_is_set_aside_and_the_next_prompt_takes_its_place(
    skipping: Client, run: FakeRun
) -> None:
    equal(run, 0)
    handle = await start_step(skipping, step_input(run, dynamic()))
    result = await handle.result()
    assert (result.trained, result.dropped, result.set_aside, result.replaced) == (2, 0, 1, 0)
    assert result.budgets == BudgetState()
    assert group_states(run) == {0: "set_aside", 1: "trained", 2: "trained"}
    refill, without = run.groups[group_id(run, 2)], run.groups[group_id(run)]
    assert (refill.opened.prompt_id, refill.replaces) == ("train-prompt-2", group_id(run))
    assert (without.bucket, without.reason) == (
        None,
        "prompt train-prompt-0: all 2 valid rollouts have reward 1, so none has an advantage; another prompt takes its "
        "place",
    )
    assert run.batches[0][1] == (group_id(run, 1), group_id(run, 2))
    metrics = run.metrics[0]
    assert (metrics["train/replaced_prompt_groups"], metrics["train/dropped_prompt_groups"]) == (0, 0)
    assert "set aside for equal rewards: 1 (1 all 1); 3 of at most 20 groups sampled" in await details_of(handle)
    run.check_identity()


async def test_without_dynamic_sampling_such_a_group_trains(skipping: Client, run: FakeRun) -> None:
    for slot in range(2):
        equal(run, slot)
    result = await (await start_step(skipping, step_input(run, policy()))).result()
    assert (result.trained, result.set_aside) == (2, 0)
    assert group_states(run) == {0: "trained", 1: "trained"}
    assert run.count("claim_prompts") == 0


async def test_masked_rollouts_have_no_vote_in_it(skipping: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Masked("truncated")]
    result = await (await start_step(skipping, step_input(run, dynamic(prompts=1)))).result()
    assert (result.trained, result.set_aside) == (1, 1)
    assert group_states(run) == {0: "set_aside", 1: "trained"}
    assert "its one valid rollout has reward 1" in (run.groups[group_id(run)].reason or "")


async def test_the_temporal_ui_says_so(skipping: Client, run: FakeRun) -> None:
    equal(run, 0, reward=0.0)
    handle = await start_group(skipping, run, group_input(run, dynamic()))
    result = await handle.result()
    assert (result.state, result.valid, result.mean_reward, result.bucket) == ("set_aside", 2, 0.0, None)
    assert (await handle.describe()).typed_search_attributes.get(GROUP_STATE) == "set_aside"
    assert "**set_aside**: prompt prompt-a: all 2 valid rollouts have reward 0" in await details_of(handle)


async def test_a_step_ends_the_run_after_the_last_group_that_it_may_sample(skipping: Client, run: FakeRun) -> None:
    """Two prompts, three times: six groups and no seventh."""
    for slot in range(6):
        equal(run, slot, reward=float(slot != 4))
    run.script[rollout_id(run, 0, 1)] = [Valid(0.5)]  # one of them has a signal
    gate = run.gates[rollout_id(run, 0)] = asyncio.Event()
    ending = asyncio.create_task(exhausted(skipping, step_input(run, dynamic(batches=3))))
    await run.until(lambda: group_id(run, 1) in run.ended)
    await until_ended(skipping, run, 0, 1)
    gate.set()
    text = await ending
    assert "training step 0 sampled 6 prompt group(s) for its 2 places" in text
    assert "5 were set aside because the rewards of a group were equal (4 all 1, 1 all 0)" in text
    assert "To go on: `onbelay run resume" in text
    assert "Lost:" not in text
    assert group_states(run) == {0: "set_aside", 1: "sealed", **dict.fromkeys(range(2, 6), "set_aside")}
    assert run.budgets() == BudgetState()
    run.check_identity()


@pytest.mark.parametrize("way", ["shrink", "park", "replace"])
async def test_the_bound_ends_the_run_whatever_becomes_of_dropped_groups(
    skipping: Client, run: FakeRun, way: str
) -> None:
    equal(run, 0)
    chosen = dynamic(prompts=1, batches=1, on_dropped_prompt=way, min_step_batch_fraction=0.1)
    assert "1 were set aside" in await exhausted(skipping, step_input(run, chosen))
    assert list(run.groups) == [group_id(run)]


async def test_a_resumed_run_with_a_higher_bound_goes_on_where_the_other_one_ended(
    skipping: Client, run: FakeRun
) -> None:
    for slot in range(3):
        equal(run, slot)
    await exhausted(skipping, step_input(run, dynamic(prompts=1, batches=2)))
    assert list(run.groups) == [group_id(run, slot) for slot in range(2)]
    attempts = dict(run.attempts)

    await exhausted(skipping, step_input(run, dynamic(prompts=1, batches=3)))
    assert list(run.groups) == [group_id(run, slot) for slot in range(3)]
    result = await (await start_step(skipping, step_input(run, dynamic(prompts=1, batches=4)))).result()
    assert (result.trained, result.set_aside) == (1, 3)
    assert {name: run.attempts[name] for name in attempts} == attempts
    assert [claim.row_index for claim in run.claims.values()] == [0, 1, 2, 3]
    run.check_identity()


async def test_a_run_that_is_resumed_without_dynamic_sampling_fills_the_places_all_the_same(
    skipping: Client, run: FakeRun
) -> None:
    for slot in range(2):
        equal(run, slot)
    await exhausted(skipping, step_input(run, dynamic(prompts=1, batches=1)))
    result = await (await start_step(skipping, step_input(run, policy(prompts=1)))).result()
    assert (result.trained, group_states(run)) == (1, {0: "set_aside", 1: "trained"})


async def test_a_group_that_was_set_aside_before_the_step_knew_is_followed_by_the_next_prompt(
    skipping: Client, run: FakeRun
) -> None:
    """The power went between the ledger's write and the step's next claim."""
    run.claim("train", 0, 0)
    equal(run, 0)
    group = group_input(run, dynamic(prompts=1)).model_copy(update={"prompt_id": "train-prompt-0"})
    await (await start_group(skipping, run, group)).result()
    result = await (await start_step(skipping, step_input(run, dynamic(prompts=1, batches=2)))).result()
    assert (result.trained, result.set_aside) == (1, 1)
    assert run.attempts[rollout_id(run, 0)] == 1
    assert run.groups[group_id(run, 1)].replaces == group_id(run)


async def test_a_power_cut_forgets_neither_the_places_nor_the_count(real: Client, run: FakeRun) -> None:
    equal(run, 0)
    equal(run, 1)
    gate = run.gates[rollout_id(run, 0, 1)] = asyncio.Event()
    step = step_input(run, dynamic(prompts=1, batches=2))
    handle = await start_step(real, step)
    await run.until(lambda: rollout_id(run, 0, 1) in run.attempts)
    await handle.terminate("power cut")
    await until_closed(real, group_id(run, 1))
    claims = dict(run.claims)
    gate.set()
    assert "2 were set aside" in await exhausted(real, step)
    assert (run.claims, group_states(run)) == (claims, {0: "set_aside", 1: "set_aside"})


async def test_a_group_that_is_executed_again_is_set_aside_as_it_was(skipping: Client, run: FakeRun) -> None:
    equal(run, 0)
    first = await (await start_group(skipping, run, group_input(run, dynamic()))).result()
    again = await (await start_group(skipping, run, group_input(run, dynamic()))).result()
    assert again == first
    assert run.count("run_rollout") == 2


async def test_what_was_set_aside_uses_no_replacement_up(skipping: Client, run: FakeRun) -> None:
    """Set aside, dropped, replaced, set aside, kept: one replacement, and one is allowed."""
    equal(run, 0)
    fail_group(run, 1, error=DATA)
    equal(run, 2)
    chosen = dynamic(prompts=1, on_dropped_prompt="replace", max_replacement_attempts=1, max_skipped_prompts=1)
    result = await (await start_step(skipping, step_input(run, chosen))).result()
    assert (result.trained, result.dropped, result.replaced, result.set_aside) == (1, 1, 1, 2)
    assert group_states(run) == {0: "set_aside", 1: "dropped", 2: "set_aside", 3: "trained"}
    plan = run.plan(0, 1).slots[0]
    assert (plan.claim.slot, plan.replacements_used) == (3, 1)


async def test_a_place_that_loses_the_group_after_it_is_lost_like_any_other(skipping: Client, run: FakeRun) -> None:
    equal(run, 0)
    fail_group(run, 2, error=DATA)
    chosen = dynamic(min_step_batch_fraction=0.5, max_skipped_prompts=1)
    result = await (await start_step(skipping, step_input(run, chosen))).result()
    assert (result.trained, result.dropped, result.set_aside) == (1, 1, 1)
    assert result.budgets == BudgetState(skipped_prompts=1)
    run.check_identity()


async def test_a_group_that_was_set_aside_ends_a_row_of_infrastructure_drops(skipping: Client, run: FakeRun) -> None:
    """It came through the infrastructure: an outage would not have let it."""
    fail_group(run, 0, error=INFRA)
    equal(run, 1)
    fail_group(run, 2, error=INFRA)
    chosen = dynamic(
        prompts=1,
        on_dropped_prompt="replace",
        max_replacement_attempts=5,
        max_infra_attempts_per_prompt=1,
        max_consecutive_dropped_prompts=1,
    )
    result = await (await start_step(skipping, step_input(run, chosen))).result()
    assert (result.trained, result.dropped, result.set_aside) == (1, 2, 1)


async def test_a_drained_step_fills_no_place_and_a_resumed_one_does(client: Client, run: FakeRun) -> None:
    equal(run, 0)
    gate = run.gates[rollout_id(run, 0)] = asyncio.Event()
    step = step_input(run, dynamic())
    handle = await start_step(client, step, turn=False)
    await until_ended(client, run, 0, 1)
    await handle.signal(TrainingStep.drain)
    gate.set()
    assert (await handle.result()).state == "drained"
    assert group_states(run) == {0: "set_aside", 1: "sealed"}
    result = await (await start_step(client, step)).result()
    assert (result.trained, result.set_aside, group_states(run)[2]) == (2, 1, "trained")


async def test_a_refilled_place_is_not_lent_and_a_group_without_signal_never(client: Client, run: FakeRun) -> None:
    """Step 0 loses a group; step 1 has one in a place of its own and one in the place of what it set aside."""
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    fail_group(run, 0, error=DATA)
    equal(run, 0, step=1)
    chosen = dynamic(ahead=1, grpo={"max_num_steps": 2}, on_dropped_prompt="replace", max_skipped_prompts=1)
    handle = await start_run(client, run_input(run, chosen))
    await run.until(lambda: {group_id(run, 1, 1), group_id(run, 2, 1)} <= set(run.ended))
    await until_ended(client, run, 1, 2)
    run.gates[rollout_id(run, 0)].set()
    await handle.result()
    assert run.batches[0][1] == (group_id(run, 1), group_id(run, 1, 1))
    assert run.groups[group_id(run, 0, 1)].state == "set_aside"
    assert run.batches[1][1] == (group_id(run, 2, 1), group_id(run, 3, 1))
    run.check_identity()


async def test_evaluations_are_never_set_aside(skipping: Client, run: FakeRun) -> None:
    evaluated = await skipping.execute_workflow(
        Evaluation.run, evaluation_input(run, dynamic()), id=f"{run.id}/eval-0", task_queue="onbelay-test"
    )
    assert evaluated.rollouts == 2
    assert {group.state for group in run.groups.values()} == {"sealed"}


async def test_an_operator_who_masks_the_rest_learns_that_nothing_is_left_to_train(
    client: Client, run: FakeRun
) -> None:
    outcomes: list[list[Outcome]] = [[Valid(1.0)], [Valid(1.0)], [DATA, DATA]]
    for index, script in enumerate(outcomes):
        run.script[rollout_id(run, index)] = script
    chosen = dynamic(rollouts=3, min_valid=3, on_dropped_prompt="park")
    handle = await start_group(client, run, group_input(run, chosen))
    await until_parked(handle)
    done = await handle.execute_update("mask", asked(MaskRollouts), result_type=LeverDone)
    assert done.state == "set_aside"
    assert "sets it aside: its 2 valid have equal rewards" in done.detail
    result = await handle.result()
    assert (result.state, result.valid, result.masked) == ("set_aside", 2, 1)
    assert run.groups[group_id(run)].reason == result.reason


async def test_a_group_that_was_set_aside_is_not_retried(client: Client, run: FakeRun) -> None:
    equal(run, 0)
    run.gates[rollout_id(run, 0, 1)] = asyncio.Event()
    handle = await start_step(client, step_input(run, dynamic(prompts=1)))
    await until_shown(handle, "set aside for equal rewards: 1")
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update(TrainingStep.retry_group, asked(RetryDroppedGroup, group_id=group_id(run)))
    assert "was set aside, its rewards are all equal" in str(refused.value.cause)
    assert f"group replay {group_id(run)}" in str(refused.value.cause)
    run.gates[rollout_id(run, 0, 1)].set()
    assert (await handle.result()).trained == 1


@pytest.mark.parametrize("request_kind", [RetryGroup, DropGroup, MaskRollouts])
def test_a_group_takes_no_request_once_it_is_set_aside(
    request_kind: type[RetryGroup] | type[DropGroup] | type[MaskRollouts],
) -> None:
    facts = GroupFacts(
        group_id="r/step-0/group-0",
        state="set_aside",
        rollouts=("valid", "masked"),
        min_valid=1,
        failure=policy().failure,
    )
    decision = decide(facts, asked(request_kind))
    assert (decision.outcome, decision.state) == ("refused", "set_aside")
