"""TrainingStep: every claimed prompt is a group, trained or dropped; a step shrinks, replaces or ends the run."""

import asyncio

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.errors import AgentFailed, IntegrityError
from tests.workflows.building import (
    group_id,
    policy,
    rollout_id,
    root_cause,
    start_step,
    step_input,
    until_closed,
)
from tests.workflows.fake_run import FakeRun, Hangs
from workflows.messages import BudgetState, StepInput

INFRA = AgentFailed("HTTP 500")
DATA = IntegrityError("tokens contradict themselves")


def fail_group(run: FakeRun, slot: int, *, error: AgentFailed | IntegrityError, step: int = 0) -> None:
    """Every rollout of a group of two uses its budget up."""
    for index in range(2):
        run.script[rollout_id(run, index, slot, step)] = [error] * (5 if error is INFRA else 2)


async def failure_of_step(client: Client, step: StepInput) -> str:
    """Why the step ended the run."""
    with pytest.raises(WorkflowFailureError) as caught:
        await (await start_step(client, step)).result()
    cause = root_cause(caught.value)
    assert isinstance(cause, ApplicationError)
    assert cause.non_retryable
    return str(cause)


def group_states(run: FakeRun) -> dict[int, str]:
    """State of each group by slot."""
    return {group.opened.slot: group.state for group in run.groups.values()}


async def test_a_step_takes_the_policy_to_the_next_version(client: Client, run: FakeRun) -> None:
    result = await (await start_step(client, step_input(run, policy(prompts=3)))).result()
    assert (result.step, result.weights, result.trained, result.dropped) == (0, run.weights(1), 3, 0)
    assert (result.state, result.budgets, result.mean_reward) == ("applied", BudgetState(), 0.5)
    assert run.batches[0][1] == tuple(f"{run.id}/step-0/group-{slot}" for slot in range(3))
    assert (run.applied, run.published, run.serving) == ({0: "batch-0"}, [1], 1)
    assert group_states(run) == {0: "trained", 1: "trained", 2: "trained"}
    assert [run.groups[group_id(run, slot)].opened.prompt_id for slot in range(3)] == [
        "train-prompt-0",
        "train-prompt-1",
        "train-prompt-2",
    ]


async def test_a_step_records_its_metrics_last(client: Client, run: FakeRun) -> None:
    await (await start_step(client, step_input(run, policy()))).result()
    assert [call.name for call in run.calls][-5:] == [
        "assemble_batch",
        "train_step",
        "publish_weights",
        "refit",
        "record_step",
    ]
    metrics = run.metrics[0]
    assert (metrics["train/loss"], metrics["train/reward"], metrics["train/dropped_prompt_groups"]) == (0.5, 0.5, 0)
    parts = sum(metrics[f"timing/train/{part}"] for part in ("exposed_generation", "policy_training", "weight_sync"))
    assert parts == pytest.approx(metrics["timing/train/total_step_time"])


async def test_a_step_shrinks_by_a_dropped_group(client: Client, run: FakeRun) -> None:
    fail_group(run, 1, error=DATA)
    chosen = policy(prompts=4, min_step_batch_fraction=0.75, max_skipped_prompts=1)
    result = await (await start_step(client, step_input(run, chosen))).result()
    assert (result.trained, result.dropped) == (3, 1)
    assert result.budgets == BudgetState(skipped_prompts=1)
    assert group_states(run) == {0: "trained", 1: "dropped", 2: "trained", 3: "trained"}
    assert run.metrics[0]["train/dropped_prompt_groups"] == 1


async def test_a_step_below_its_floor_ends_the_run_with_the_numbers(real: Client, run: FakeRun) -> None:
    fail_group(run, 1, error=DATA)
    text = await failure_of_step(real, step_input(run, policy(prompts=4, max_skipped_prompts=5)))
    assert "training step 0 lost 1 of 4 prompt group(s), leaving 3, below the floor of 4" in text
    assert f"{run.id}/step-0/group-1 (train-prompt-1): prompt train-prompt-1: 0 of 2 rollouts are valid" in text
    assert not run.batches


async def test_a_dropped_group_is_replaced_by_a_fresh_prompt(client: Client, run: FakeRun) -> None:
    fail_group(run, 0, error=DATA)
    chosen = policy(on_dropped_prompt="replace", max_skipped_prompts=1)
    result = await (await start_step(client, step_input(run, chosen))).result()
    assert (result.trained, result.dropped) == (2, 1)
    assert group_states(run) == {0: "dropped", 1: "trained", 2: "trained"}
    assert run.groups[group_id(run, 2)].opened.prompt_id == "train-prompt-2"
    assert run.metrics[0]["train/replaced_prompt_groups"] == 1


async def test_when_the_replacement_is_dropped_too_the_floor_decides(real: Client, run: FakeRun) -> None:
    fail_group(run, 0, error=DATA)
    fail_group(run, 2, error=DATA)
    chosen = policy(on_dropped_prompt="replace", max_skipped_prompts=5, max_replacement_attempts=1)
    text = await failure_of_step(real, step_input(run, chosen))
    assert "training step 0 lost 1 of 2 prompt group(s), leaving 1, below the floor of 2" in text


async def test_the_first_drop_that_no_budget_covers_cancels_the_other_groups(real: Client, run: FakeRun) -> None:
    fail_group(run, 1, error=INFRA)
    gates = [run.gates.setdefault(rollout_id(run, index, 1), asyncio.Event()) for index in range(2)]
    others = [rollout_id(run, 0, slot) for slot in (0, 2)]
    run.script |= {name: [Hangs()] for name in others}
    chosen = policy(prompts=3, min_step_batch_fraction=0.1, backoff_base_s=0.01)
    failing = asyncio.create_task(failure_of_step(real, step_input(run, chosen)))
    await run.until(lambda: all(name in run.attempts for name in others))
    for gate in gates:
        gate.set()
    text = await failing
    assert "1 prompt groups in a row were dropped" in text
    assert "max_consecutive_dropped_prompts=0" in text
    assert [run.groups[group_id(run, slot)].reason for slot in (0, 2)] == ["cancelled", "cancelled"]


async def test_drop_counters_of_earlier_steps_count(real: Client, run: FakeRun) -> None:
    chosen = policy(max_skipped_prompts=2, min_step_batch_fraction=0.5)
    for step in (0, 1, 2):
        fail_group(run, 0, error=DATA, step=step)
    for step in (0, 1):
        await (await start_step(real, step_input(run, chosen, step))).result()
        run.serving = 0
    text = await failure_of_step(real, step_input(run, chosen, step=2))
    assert "step 2: skipped 2 prompts and this one also exhausted its data budget" in text
    assert f"onbelay run resume {run.id} failure.max_skipped_prompts=3" in text


async def test_a_kept_group_resets_the_consecutive_counter(client: Client, run: FakeRun) -> None:
    chosen = policy(
        prompts=3, max_consecutive_dropped_prompts=2, max_infra_attempts_per_prompt=1, min_step_batch_fraction=0.3
    )
    run.script[rollout_id(run, 0, 2)] = [Hangs()]
    for slot in (0, 1):
        fail_group(run, slot, error=INFRA)
    handle = await start_step(client, step_input(run, chosen))
    await run.until(lambda: run.budgets().consecutive_drops == 2)
    run.release.set()
    assert (await handle.result()).budgets == BudgetState(consecutive_drops=0)
    run.script[rollout_id(run, 0, 2, step=1)] = [Hangs()]
    run.release.clear()
    for slot in (0, 1):
        fail_group(run, slot, error=INFRA, step=1)
    run.serving = 0
    again = await start_step(client, step_input(run, chosen, step=1))
    await run.until(lambda: run.budgets().consecutive_drops == 2)
    run.release.set()
    assert (await again.result()).state == "applied"


async def test_a_group_that_is_opened_again_gives_back_what_it_cost(real: Client, run: FakeRun) -> None:
    fail_group(run, 0, error=DATA)
    text = await failure_of_step(real, step_input(run, policy(max_skipped_prompts=1)))
    assert "below the floor of 2" in text
    assert run.budgets() == BudgetState(skipped_prompts=1)
    result = await (await start_step(real, step_input(run, policy(max_skipped_prompts=0)))).result()
    assert (result.trained, result.dropped, run.budgets()) == (2, 0, BudgetState())


async def test_consumed_samples_are_the_groups_that_were_trained(client: Client, run: FakeRun) -> None:
    chosen = policy(prompts=4, max_skipped_prompts=5, min_step_batch_fraction=0.75)
    fail_group(run, 2, error=DATA, step=1)
    for step in range(3):
        await (await start_step(client, step_input(run, chosen, step))).result()
        run.serving = 0
    assert [run.metrics[step]["train/prompt_groups"] for step in range(3)] == [4, 3, 4]
    assert sum(group.state == "trained" for group in run.groups.values()) == 11


async def test_a_resumed_step_keeps_what_it_has_and_runs_what_is_missing(real: Client, run: FakeRun) -> None:
    """Three of four groups are there: one is run, and no prompt is thrown away."""
    chosen = policy(prompts=4)
    run.script[rollout_id(run, 0, 3)] = [Hangs()]
    handle = await start_step(real, step_input(run, chosen))
    await run.until(lambda: sum(group.state == "sealed" for group in run.groups.values()) == 3)
    await run.until(lambda: rollout_id(run, 0, 3) in run.attempts and run.is_settled(group_id(run, 3), 1))
    await handle.terminate("power cut")
    await until_closed(real, group_id(run, 3))
    claims, rollouts = dict(run.claims), run.count("run_rollout")
    assert (await (await start_step(real, step_input(run, chosen))).result()).trained == 4
    assert run.claims == claims
    assert run.count("run_rollout") == rollouts + 1  # its sibling had settled
    run.check_identity()


async def test_a_step_executed_again_goes_straight_to_training(client: Client, run: FakeRun) -> None:
    step = step_input(run, policy())
    first = await (await start_step(client, step)).result()
    rollouts, opened = run.count("run_rollout"), run.count("open_group")
    again = await (await start_step(client, step)).result()
    assert again == first
    assert (run.count("run_rollout"), run.count("open_group"), run.count("assemble_batch")) == (rollouts, opened, 1)
    assert run.applied == {0: "batch-0"}


async def test_a_step_executed_again_keeps_its_prompts_and_what_was_settled(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 1, 1)] = [Hangs()]
    step = step_input(run, policy())
    handle = await start_step(real, step)
    await run.until(lambda: sum(len(group.settled) for group in run.groups.values()) == 3)
    await run.until(lambda: rollout_id(run, 1, 1) in run.attempts)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    claimed = dict(run.claims)
    await (await start_step(real, step)).result()
    assert run.claims == claimed
    assert sorted(run.attempts.values()) == [1, 1, 1, 2]


async def test_a_cancelled_step_leaves_no_group_open(real: Client, run: FakeRun) -> None:
    for slot in range(3):
        run.script[rollout_id(run, 0, slot)] = [Hangs()]
    handle = await start_step(real, step_input(run, policy(prompts=3)))
    await run.until(lambda: run.count("run_rollout") == 6)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert (await handle.describe()).status == WorkflowExecutionStatus.CANCELED
    assert {group.state for group in run.groups.values()} == {"dropped"}
    assert {group.reason for group in run.groups.values()} == {"cancelled"}
