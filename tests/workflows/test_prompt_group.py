"""PromptGroup: every rollout ends valid, masked or lost; the group is sealed or dropped with a reason."""

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError

from activities.errors import AgentFailed, HandedOver, IntegrityError
from tests.workflows.building import group_id, group_input, policy, rollout_id, start_group
from tests.workflows.fake_run import FakeRun, Hangs, Masked, Valid
from workflows.attempts import MAX_HANDOVERS
from workflows.messages import BatchRef, BudgetState, OpenGroup, RunPolicy, RunRollout

INFRA = AgentFailed("HTTP 500")
DATA = IntegrityError("tokens contradict themselves")


async def test_a_group_ends_sealed_with_its_rollouts(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Valid(0.25)]
    run.script[rollout_id(run, 1)] = [Valid(0.75)]
    group = group_input(run, policy())
    result = await (await start_group(client, run, group)).result()
    assert (result.group_id, result.state, result.mean_reward) == (f"{run.id}/step-0/group-0", "sealed", 0.5)
    assert (result.valid, result.masked, result.lost) == (2, 0, 0)
    assert (result.bucket, result.reason) == (None, None)
    assert run.groups[group_id(run)].state == "sealed"
    assert run.groups[group_id(run)].opened.prompt_id == "prompt-a"
    assert sorted(call.request.model_dump()["rollout_id"] for call in run.calls_of("run_rollout")) == [
        f"{run.id}/step-0/group-0/rollout-0",
        f"{run.id}/step-0/group-0/rollout-1",
    ]


async def test_masked_rollouts_settle_without_a_retry(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 1)] = [Masked("truncated")]
    result = await (await start_group(client, run, group_input(run, policy()))).result()
    assert (result.state, result.valid, result.masked, result.lost) == ("sealed", 1, 1, 0)
    assert result.mean_reward == 0.0
    assert run.attempts[rollout_id(run, 1)] == 1


async def test_a_group_dropped_for_its_content_counts_as_data(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 1)] = [Masked("truncated")]
    result = await (await start_group(client, run, group_input(run, policy()))).result()
    assert (result.state, result.bucket) == ("dropped", "data")


async def test_a_dropped_group_carries_the_counters_of_the_run(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    result = await (await start_group(client, run, group_input(run, policy(rollouts=1)))).result()
    assert (result.failure_classes, result.budgets) == (("IntegrityError",), BudgetState(skipped_prompts=1))


async def test_where_a_lost_rollout_costs_the_group_its_siblings_do_not_save_it(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(rollouts=3, min_valid=2, on_lost_rollout="drop_group")
    result = await (await start_group(client, run, group_input(run, chosen))).result()
    assert (result.state, result.valid, result.lost) == ("dropped", 2, 1)
    assert "2 of 3 rollouts are valid, none may be lost (rollout-0 lost after 2 attempts" in (result.reason or "")


async def test_a_rollout_says_which_versions_may_sample_for_it(client: Client, run: FakeRun) -> None:
    group = group_input(run, policy(rollouts=1)).model_copy(update={"newest_policy_version": 2})
    run.serving = 2
    assert (await (await start_group(client, run, group)).result()).valid == 1
    (call,) = run.calls_of("run_rollout")
    assert isinstance(call.request, RunRollout)
    assert (call.request.policy_version, call.request.newest_policy_version) == (0, 2)


async def test_endpoints_that_lost_the_policy_get_it_back_and_no_budget_pays(client: Client, run: FakeRun) -> None:
    run.serving = -1
    chosen = policy(rollouts=1, max_infra_attempts_per_prompt=1, max_data_attempts_per_prompt=1)
    result = await (await start_group(client, run, group_input(run, chosen))).result()
    assert (result.valid, run.count("restore_policy"), run.serving) == (1, 1, 0)


async def test_a_rollout_that_is_handed_over_goes_on_and_no_budget_pays(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [HandedOver("the worker stops")] * 7
    chosen = policy(rollouts=1, max_infra_attempts_per_prompt=1, max_data_attempts_per_prompt=1)
    result = await (await start_group(client, run, group_input(run, chosen))).result()
    assert (result.valid, result.failure_classes) == (1, ())
    assert run.attempts[rollout_id(run, 0)] == 8


async def test_a_rollout_is_not_handed_over_for_ever(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [HandedOver("the worker stops")] * (MAX_HANDOVERS + 1)
    chosen = policy(rollouts=1, max_infra_attempts_per_prompt=1)
    result = await (await start_group(client, run, group_input(run, chosen))).result()
    assert (result.lost, result.failure_classes) == (1, ("HandedOver",))
    assert run.attempts[rollout_id(run, 0)] == MAX_HANDOVERS + 1


async def test_a_group_of_a_closed_step_ends_with_a_clear_error(client: Client, run: FakeRun) -> None:
    batch = BatchRef(step=0, digest="b", groups=1, rows=1, rollouts=1, trained_tokens=1, mean_reward=0.0)
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_group(client, run, group_input(run, policy()))
    await run.until(lambda: run.count("run_rollout") == 2)
    run.batches[0] = (batch, (f"{run.id}/step-0/group-1",))
    run.release.set()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.type == "StepClosed"
    assert "came too late: step 0 is closed and trains without it" in caught.value.cause.message


async def test_a_group_that_is_executed_again_may_sample_everything_afresh(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    group = group_input(run, policy(min_valid=2))
    assert (await (await start_group(client, run, group)).result()).state == "dropped"
    fresh = group.model_copy(update={"fresh": True})
    assert (await (await start_group(client, run, fresh)).result()).state == "sealed"
    last = run.calls_of("run_rollout")[-1].request
    assert isinstance(last, RunRollout)
    assert (last.index, last.fresh_after) == (0, 1)


async def test_a_cancelled_group_is_dropped_for_nobody_s_fault(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_group(real, run, group_input(run, policy()))
    await run.until(lambda: run.count("run_rollout") == 2 and 1 in run.groups[group_id(run)].settled)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, CancelledError)
    assert (await handle.describe()).status == WorkflowExecutionStatus.CANCELED
    stored = run.groups[group_id(run)]
    assert (stored.state, stored.bucket, stored.reason) == ("dropped", None, "cancelled")
    assert run.attempts[rollout_id(run, 0)] == 1


async def test_a_group_cancelled_between_retries_is_dropped(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [INFRA] * 5
    handle = await start_group(real, run, group_input(run, policy(rollouts=1, backoff_base_s=30)))
    await run.until(lambda: run.count("run_rollout") == 1)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert run.groups[group_id(run)].reason == "cancelled"
    assert run.count("run_rollout") == 1


async def test_a_rollout_that_may_run_once_is_lost_with_its_first_failure(client: Client, run: FakeRun) -> None:
    run.runs_once = True
    run.script[rollout_id(run, 0)] = [INFRA]
    result = await (await start_group(client, run, group_input(run, policy()))).result()
    assert (result.valid, result.lost, run.attempts[rollout_id(run, 0)]) == (1, 1, 1)
    assert run.groups[group_id(run)].settled[0].reason == "AgentFailed (agent): agent_run_error: HTTP 500"


async def test_a_final_failure_is_not_healed(client: Client, run: FakeRun) -> None:
    run.runs_once, run.serving = True, -1
    result = await (await start_group(client, run, group_input(run, policy(rollouts=1)))).result()
    assert (result.lost, run.count("restore_policy"), run.count("run_rollout")) == (1, 0, 1)


async def test_a_group_is_as_old_as_the_oldest_of_its_valid_rollouts(client: Client, run: FakeRun) -> None:
    """Versions 4, 5 and 5 that sampled valid rollouts make it version 4; a masked one has no say."""
    run.serving = 5
    outcomes = (Valid(1.0, older=1), Valid(0.0), Valid(0.0), Masked("truncated"))
    for index, outcome in enumerate(outcomes):
        run.script[rollout_id(run, index)] = [outcome]
    group = group_input(run, policy(rollouts=4)).model_copy(update={"weights": run.weights(5)})
    assert (await (await start_group(client, run, group)).result()).policy_version == 4


async def test_a_group_without_a_valid_rollout_has_the_version_it_was_started_with(
    client: Client, run: FakeRun
) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [Masked("truncated")]
    assert (await (await start_group(client, run, group_input(run, policy()))).result()).policy_version == 0


async def test_what_an_earlier_execution_settled_is_not_run_again(client: Client, run: FakeRun) -> None:
    chosen = policy(rollouts=3)
    earlier_execution(run, chosen, settled={0: Valid(1.0), 2: Masked("truncated")})
    result = await (await start_group(client, run, group_input(run, chosen))).result()
    assert (result.valid, result.masked, result.lost) == (2, 1, 0)
    assert [call.request.model_dump()["index"] for call in run.calls_of("run_rollout")] == [1]


async def test_a_group_that_is_sealed_already_gives_its_result_again(client: Client, run: FakeRun) -> None:
    group = group_input(run, policy())
    first = await (await start_group(client, run, group)).result()
    again = await (await start_group(client, run, group)).result()
    assert again == first
    assert (run.count("run_rollout"), run.count("seal_group")) == (2, 1)


async def test_a_dropped_group_that_is_executed_again_runs_its_lost_rollouts_again(
    client: Client, run: FakeRun
) -> None:
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    group = group_input(run, policy(min_valid=2))
    assert (await (await start_group(client, run, group)).result()).state == "dropped"
    again = await (await start_group(client, run, group)).result()
    assert (again.state, again.valid) == ("sealed", 2)
    assert [run.attempts[rollout_id(run, index)] for index in (0, 1)] == [3, 1]


def earlier_execution(run: FakeRun, chosen: RunPolicy, settled: dict[int, Valid | Masked]) -> None:
    """Leave a group in the ledger as a workflow that was terminated would."""
    group = group_input(run, chosen)
    stored = run.open(
        OpenGroup(
            run_id=run.id,
            group_id=group_id(run),
            step=group.step,
            slot=group.slot,
            purpose=group.purpose,
            prompt_id=group.prompt_id,
            row_index=group.row_index,
            num_rollouts=group.num_rollouts,
        )
    )
    for index, outcome in settled.items():
        stored.settled[index] = outcome.settled_as(f"{group_id(run)}/rollout-{index}", index, attempt=0, version=0)
