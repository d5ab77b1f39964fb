"""`temporal workflow reset` of a step or of a group: what is done stays done, and no gradient is applied twice."""

import uuid

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client

from tests.workflows.building import group_id, policy, rollout_id, run_input, start_run, until_closed
from tests.workflows.fake_run import FakeRun, Hangs
from workflows.training_run import TrainingRun

pytestmark = pytest.mark.integration


async def reset(client: Client, workflow_id: str) -> None:
    """As `temporal workflow reset --type FirstWorkflowTask` does."""
    handle = client.get_workflow_handle(workflow_id)
    history = await handle.fetch_history()
    first = next(e.event_id for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED)
    await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=workflow_id),
            workflow_task_finish_event_id=first,
            reason="a test",
            request_id=uuid.uuid4().hex,
        )
    )


async def test_a_step_that_is_reset_while_its_groups_run_trains_once(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    chosen = policy(prompts=2, grpo={"max_num_steps": 2})
    handle = await start_run(real, run_input(run, chosen))
    await run.until(lambda: run.attempts.get(rollout_id(run, 0)) == 1 and group_id(run, 1) in run.ended)
    await reset(real, f"{run.id}/step-0")
    await run.until(lambda: run.attempts[rollout_id(run, 0)] == 2)
    assert (await handle.result()).steps == 2
    assert (run.applied, run.count("train_step")) == ({0: "batch-0", 1: "batch-1"}, 2)
    assert run.attempts[rollout_id(run, 0, 1)] == 1
    run.check_identity()


async def test_a_step_that_is_reset_while_it_trains_keeps_its_batch(real: Client, run: FakeRun) -> None:
    run.trainer = [Hangs()]
    handle = await start_run(real, run_input(run, policy(grpo={"max_num_steps": 1})))
    await run.until(lambda: run.count("train_step") == 1)
    await reset(real, f"{run.id}/step-0")
    await run.until(lambda: run.count("train_step") == 2)
    run.release.set()
    assert (await handle.result()).steps == 1
    assert (run.applied, run.count("assemble_batch")) == ({0: "batch-0"}, 1)


async def test_a_group_that_is_reset_while_it_runs_keeps_what_has_settled(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0)] = [Hangs()]
    handle = await start_run(real, run_input(run, policy(prompts=1, grpo={"max_num_steps": 1})))
    await run.until(lambda: rollout_id(run, 0) in run.attempts and run.is_settled(group_id(run), 1))
    await reset(real, group_id(run))
    await run.until(lambda: run.attempts[rollout_id(run, 0)] == 2)
    assert (await handle.result()).steps == 1
    assert run.attempts == {rollout_id(run, 0): 2, rollout_id(run, 1): 1}
    assert run.batches[0][1] == (group_id(run),)


async def test_a_trained_group_and_its_step_that_are_reset_change_nothing(real: Client, run: FakeRun) -> None:
    await (await start_run(real, run_input(run, policy(prompts=1, grpo={"max_num_steps": 1})))).result()
    before = (dict(run.applied), dict(run.attempts), dict(run.batches))
    for name in (group_id(run), f"{run.id}/step-0"):
        await reset(real, name)
        await until_closed(real, name)
        await real.get_workflow_handle(name).result()
    assert (run.applied, run.attempts, run.batches) == before
    assert run.count("assemble_batch") == 1


async def test_a_run_that_is_reset_goes_on_with_what_the_ledger_has(real: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, step=1)] = [Hangs()]
    await start_run(real, run_input(run, policy(prompts=1, ahead=1, grpo={"max_num_steps": 3})))
    await run.until(lambda: 0 in run.applied and run.attempts.get(rollout_id(run, 0, step=1)) == 1)
    await reset(real, run.id)
    assert (await real.get_workflow_handle_for(TrainingRun.run, run.id).result()).steps == 3
    assert run.applied == {0: "batch-0", 1: "batch-1", 2: "batch-2"}
    assert run.attempts[rollout_id(run, 0)] == 1
    assert run.count("assemble_batch") == 3
    run.check_identity()
