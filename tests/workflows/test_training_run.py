"""TrainingRun: versions in order, control by updates, an honest end in the ledger."""

from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError

from activities.errors import IntegrityError
from tests.workflows.building import policy, rollout_id, run_input, start_run
from tests.workflows.fake_run import FakeRun, Hangs, Masked
from workflows.messages import RunPolicy

DATA = IntegrityError("tokens contradict themselves")


def steps(count: int, grpo: dict[str, Any] | None = None, **failure: Any) -> RunPolicy:
    """A policy of `count` steps of one prompt and one rollout."""
    return policy(prompts=1, rollouts=1, grpo={"max_num_steps": count, **(grpo or {})}, **failure)


def names(run: FakeRun) -> list[str]:
    """Activities in order."""
    return [call.name for call in run.calls]


async def test_the_first_weights_are_in_place_before_the_first_rollout(client: Client, run: FakeRun) -> None:
    run.serving = -1
    await (await start_run(client, run_input(run, steps(1)))).result()
    assert names(run)[:2] == ["publish_weights", "refit"]
    assert run.published == [0, 1]
    assert run.count("refit") == 2  # the endpoints never had to be healed


async def test_a_run_applies_its_steps_in_order_and_completes(client: Client, run: FakeRun) -> None:
    result = await (await start_run(client, run_input(run, steps(3)))).result()
    assert (result.state, result.steps, result.policy_version) == ("completed", 3, 3)
    assert list(run.applied) == [0, 1, 2]
    assert [run.groups[f"{run.id}/step-{step}/group-0"].state for step in range(3)] == ["trained"] * 3
    assert run.states == [("completed", None)]


async def test_evaluations_come_at_the_start_on_schedule_and_at_the_end(client: Client, run: FakeRun) -> None:
    chosen = steps(3, {"val_period": 2, "val_at_start": True, "val_at_end": True})
    await (await start_run(client, run_input(run, chosen))).result()
    assert [evaluation.version for evaluation in run.evaluations] == [0, 2, 3]
    assert f"{run.id}/eval-2/group-1" in run.groups
    assert all(group_id.startswith(f"{run.id}/step-") for _, ids in run.batches.values() for group_id in ids)


async def test_a_last_version_that_was_evaluated_on_schedule_is_not_evaluated_again(
    client: Client, run: FakeRun
) -> None:
    await (await start_run(client, run_input(run, steps(2, {"val_period": 2, "val_at_end": True})))).result()
    assert [evaluation.version for evaluation in run.evaluations] == [2]


async def test_a_new_execution_goes_on_where_the_last_one_ended(client: Client, run: FakeRun) -> None:
    chosen = steps(3, {"val_at_start": True})
    handle = await start_run(client, run_input(run, chosen, steps_per_execution=1))
    first = await client.get_workflow_handle(run.id, run_id=handle.first_execution_run_id).describe()
    result = await handle.result()
    last = await client.get_workflow_handle(run.id).describe()
    assert (result.steps, list(run.applied), first.run_id != last.run_id) == (3, [0, 1, 2], True)
    assert run.published == [0, 1, 2, 3]
    assert len(run.evaluations) == 1


async def test_skipped_prompts_count_across_executions(real: Client, run: FakeRun) -> None:
    for step in (0, 2):
        run.script[rollout_id(run, 0, step=step)] = [DATA, DATA]
    chosen = policy(
        prompts=2, rollouts=1, grpo={"max_num_steps": 3}, max_skipped_prompts=1, min_step_batch_fraction=0.5
    )
    with pytest.raises(WorkflowFailureError):
        await (await start_run(real, run_input(run, chosen, steps_per_execution=1))).result()
    assert list(run.applied) == [0, 1]
    state, reason = run.states[-1]
    assert state == "failed"
    assert "skipped 1 prompts and this one also exhausted its data budget" in (reason or "")


async def test_a_resumed_run_publishes_the_version_it_goes_on_with(client: Client, run: FakeRun) -> None:
    result = await (await start_run(client, run_input(run, steps(4), next_step=3))).result()
    assert (result.steps, run.published, list(run.applied)) == (4, [3, 4], [3])


async def test_a_failed_step_ends_the_run_with_the_root_cause_in_the_ledger(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Masked("truncated")]
    handle = await start_run(client, run_input(run, steps(1, max_skipped_prompts=5)))
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    ((state, reason),) = run.states
    assert state == "failed"
    assert "training step 0 lost 1 of 1 prompt group(s)" in (reason or "")
    assert "rollout-0 masked after 1 attempt: truncated" in (reason or "")


async def test_a_cancelled_run_is_stopped_and_can_go_on_later(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(real, run_input(run, steps(1)))
    await run.until(lambda: run.count("run_rollout") == 1)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert (await handle.describe()).status == WorkflowExecutionStatus.CANCELED
    assert run.states == [("stopped", "cancelled")]
    assert [group.reason for group in run.groups.values()] == ["cancelled"]
    again = await (await start_run(real, run_input(run, steps(1)))).result()
    assert (again.state, run.applied) == ("completed", {0: "batch-0"})


async def test_a_cancelled_pause_is_stopped(real: Client, run: FakeRun) -> None:
    handle = await start_run(real, run_input(run, steps(1), paused=True))
    await run.until(lambda: run.states == [("paused", None)])
    await handle.cancel()
    await run.until(lambda: len(run.states) == 2)
    assert run.states[-1] == ("stopped", "cancelled")
