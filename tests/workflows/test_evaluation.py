"""Evaluation: validation prompts, one rollout each, a mean over the valid ones."""

import pytest
from temporalio.client import Client, WorkflowFailureError

from tests.workflows.building import QUEUE, evaluation_input, policy
from tests.workflows.fake_run import FakeRun, Hangs, Masked, Valid
from workflows.evaluation import Evaluation


async def test_an_evaluation_is_the_mean_over_valid_rollouts(client: Client, run: FakeRun) -> None:
    run.validation_prompts = 3
    for slot, outcome in enumerate((Valid(0.25), Valid(0.75), Masked("truncated"))):
        run.script[f"{run.id}/eval-0/group-{slot}/rollout-0"] = [outcome]
    chosen = policy(rollouts=8, min_valid=4)
    result = await client.execute_workflow(
        Evaluation.run, evaluation_input(run, chosen), id=f"{run.id}/eval-0", task_queue=QUEUE
    )
    assert (result.version, result.mean_reward, result.rollouts) == (0, 0.5, 2)
    assert [group.opened.num_rollouts for group in run.groups.values()] == [1, 1, 1]
    assert {group.opened.purpose for group in run.groups.values()} == {"validation"}


async def test_an_evaluation_asks_for_as_many_prompts_as_the_recipe_says(client: Client, run: FakeRun) -> None:
    run.validation_prompts = 3
    chosen = policy(grpo={"max_val_samples": 2})
    await client.execute_workflow(
        Evaluation.run, evaluation_input(run, chosen), id=f"{run.id}/eval-0", task_queue=QUEUE
    )
    assert len(run.groups) == 2


async def test_a_cancelled_evaluation_leaves_no_group_open(real: Client, run: FakeRun) -> None:
    for slot in (0, 1):
        run.script[f"{run.id}/eval-0/group-{slot}/rollout-0"] = [Hangs()]
    handle = await real.start_workflow(
        Evaluation.run, evaluation_input(run, policy()), id=f"{run.id}/eval-0", task_queue=QUEUE
    )
    await run.until(lambda: run.count("run_rollout") == 2)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    assert {group.reason for group in run.groups.values()} == {"cancelled"}
