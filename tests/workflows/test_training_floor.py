"""A step below its floor may park: it waits for a lower floor or for a group that is brought back, not for ever."""

from typing import Any

import pytest
from temporalio.client import (
    Client,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowUpdateFailedError,
    WorkflowUpdateStage,
)
from temporalio.exceptions import ApplicationError

from activities.errors import IntegrityError
from configs.failure import FailureConfig
from tests.workflows.building import (
    asked,
    group_id,
    policy,
    rollout_id,
    root_cause,
    start_step,
    step_input,
    until_parked,
    until_shown,
)
from tests.workflows.fake_run import FakeRun, Hangs
from workflows.messages import (
    RunPolicy,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    DropGroup,
    LeverDone,
    LeverPreview,
    RetryDroppedGroup,
    RetryGroup,
)
from workflows.training_step import TrainingStep

DATA = IntegrityError("tokens contradict themselves")
ACCEPTED = WorkflowUpdateStage.ACCEPTED
Handle = WorkflowHandle[Any, Any]


def parking(**failure: Any) -> RunPolicy:
    """Two prompts of which both are needed; what fails is parked for an hour, then dropped."""
    return policy(prompts=2, on_dropped_prompt="park", park_timeout_s=3600, max_skipped_prompts=5, **failure)


async def parked_step(client: Client, run: FakeRun, chosen: RunPolicy | None = None) -> Handle:
    """A step that lost its first group: an operator dropped it."""
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA, DATA]
    handle = await start_step(client, step_input(run, chosen or parking()))
    group = client.get_workflow_handle(group_id(run))
    await run.until(lambda: group_id(run) in run.groups)
    await until_parked(group)
    await group.execute_update(PromptGroup.drop, asked(DropGroup))
    await until_parked(handle)
    return handle


def state_of(run: FakeRun) -> str | None:
    """State of the first group; None before it is opened."""
    return run.groups[group_id(run)].state if group_id(run) in run.groups else None


async def refusal(handle: Handle, update: Any, argument: object) -> str:
    """Why an update is refused."""
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update(update, argument)
    cause = caught.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == "LeverRefused"
    return cause.message


async def test_a_parked_step_says_what_it_lost_and_how_to_go_on(real: Client, run: FakeRun) -> None:
    handle = await parked_step(real, run)
    shown = await until_shown(handle, "below its floor of 2")
    assert f"{run.id}/step-0 lost 1 group and keeps 1" in shown
    assert f"onbelay group retry {run.id}/step-0/group-0" in shown
    assert f"onbelay run set-floor {run.id}" in shown
    assert not run.batches
    await handle.cancel()


async def test_a_lower_floor_releases_a_parked_step(client: Client, run: FakeRun) -> None:
    handle = await parked_step(client, run)
    await handle.signal(TrainingStep.adopt, FailureConfig(min_step_batch_fraction=0.5, on_dropped_prompt="park"))
    result = await handle.result()
    assert (result.trained, result.dropped) == (1, 1)
    run.check_identity()


async def test_a_group_that_an_operator_brings_back_releases_a_parked_step(client: Client, run: FakeRun) -> None:
    handle = await parked_step(client, run)
    done = await handle.execute_update(
        "retry_group", asked(RetryDroppedGroup, group_id=group_id(run)), result_type=LeverDone
    )
    assert (done.changed, done.state, done.target) == (True, "open", group_id(run))
    result = await handle.result()
    assert (result.trained, result.dropped) == (2, 0)
    retried = [record for record in run.audit.values() if record.verb == "retry_group"]
    assert [(r.target, r.actor, r.reason, r.outcome) for r in retried] == [(group_id(run), "ada", "a test", "done")]


async def test_a_retried_group_that_fails_again_is_dropped_and_the_step_parks_again(
    client: Client, run: FakeRun
) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA] * 4
    handle = await start_step(client, step_input(run, parking()))
    group = client.get_workflow_handle(group_id(run))
    for _ in range(2):
        await run.until(lambda: group_id(run) in run.groups)
        await until_parked(group)
        await group.execute_update(PromptGroup.drop, asked(DropGroup))
        await until_parked(handle)
        await handle.execute_update(TrainingStep.retry_group, asked(RetryDroppedGroup, group_id=group_id(run)))
        await run.until(lambda: run.groups[group_id(run)].state != "dropped")
    assert (await handle.result()).trained == 2


async def test_a_step_that_nobody_decides_ends_the_run(skipping: Client, run: FakeRun) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA, DATA]
    handle = await start_step(skipping, step_input(run, parking()))
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    text = str(root_cause(caught.value))
    assert "training step 0 lost 1 of 2 prompt group(s), leaving 1, below the floor of 2" in text
    assert "nobody decided within 1:00:00" in text
    assert f"{group_id(run)} (train-prompt-0): prompt train-prompt-0: 0 of 2 rollouts are valid" in text
    assert f"onbelay run resume {run.id} failure.min_step_batch_fraction=0.5" in text


async def test_a_lower_floor_does_not_close_a_step_whose_groups_still_run(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    handle = await parked_step(client, run)
    await handle.signal(TrainingStep.adopt, FailureConfig(min_step_batch_fraction=0.5, on_dropped_prompt="park"))
    await until_shown(handle, "**rollouts**")
    assert not run.batches
    run.release.set()
    assert (await handle.result()).trained == 1


async def test_a_raised_floor_ends_a_step_that_it_no_longer_covers(real: Client, run: FakeRun) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    chosen = policy(max_skipped_prompts=1, min_step_batch_fraction=0.5)
    handle = await start_step(real, step_input(run, chosen))
    await run.until(lambda: state_of(run) == "dropped")
    await handle.signal(TrainingStep.adopt, FailureConfig(min_step_batch_fraction=1, max_skipped_prompts=1))
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert "below the floor of 2 set by failure.min_step_batch_fraction=1" in str(root_cause(caught.value))


async def test_a_dropped_group_of_an_open_step_is_retried_and_trains(client: Client, run: FakeRun) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    chosen = policy(max_skipped_prompts=1, min_step_batch_fraction=0.5)
    handle = await start_step(client, step_input(run, chosen))
    await run.until(lambda: state_of(run) == "dropped")
    await until_shown(handle, "1 of 2 groups ended")
    said = await handle.query(
        TrainingStep.preview, LeverPreview(verb="retry_group", arguments={"group_id": group_id(run)})
    )
    assert said == f"{group_id(run)} runs its lost rollouts again in step 0"
    await handle.execute_update(TrainingStep.retry_group, asked(RetryDroppedGroup, group_id=group_id(run), fresh=True))
    run.release.set()
    result = await handle.result()
    assert (result.trained, result.dropped, run.budgets().skipped_prompts) == (2, 0, 0)


async def test_what_cannot_be_retried_is_refused_and_audited(client: Client, run: FakeRun) -> None:
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    handle = await start_step(client, step_input(run, policy()))
    await run.until(lambda: state_of(run) == "sealed")
    retry: Any = TrainingStep.retry_group
    assert "is not dropped" in await refusal(handle, retry, asked(RetryDroppedGroup, group_id=group_id(run)))
    assert "is no group of step 0" in await refusal(
        handle, retry, asked(RetryDroppedGroup, group_id=f"{run.id}/step-1/group-0")
    )
    assert [record.outcome for record in run.audit.values()] == ["refused", "refused"]
    run.release.set()
    assert (await handle.result()).trained == 2


async def test_two_operators_who_retry_at_once_run_the_group_once(client: Client, run: FakeRun) -> None:
    handle = await parked_step(client, run)
    run.audit_is_slow.set()
    first = await handle.start_update(
        "retry_group", asked(RetryDroppedGroup, group_id=group_id(run)), wait_for_stage=ACCEPTED, id="first"
    )
    second = await handle.start_update(
        "retry_group", asked(RetryDroppedGroup, group_id=group_id(run)), wait_for_stage=ACCEPTED, id="second"
    )
    run.audit_is_slow.clear()
    await first.result()
    with pytest.raises(WorkflowUpdateFailedError):
        await second.result()
    assert (await handle.result()).trained == 2
    assert [call.request.model_dump()["group_id"] for call in run.calls_of("open_group")].count(group_id(run)) == 2


async def test_a_request_without_a_reason_is_not_even_accepted(real: Client, run: FakeRun) -> None:
    handle = await parked_step(real, run)
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update("retry_group", {"actor": "ada", "reason": " ", "group_id": group_id(run)})
    assert "reason is blank" in str(caught.value.cause)
    assert not [record for record in run.audit.values() if record.verb == "retry_group"]
    await handle.cancel()


async def test_a_step_shows_which_of_its_groups_waits_for_an_operator_until_it_goes_on(
    client: Client, run: FakeRun
) -> None:
    for index in (0, 1):
        run.script[rollout_id(run, index)] = [DATA, DATA]
    run.script[rollout_id(run, 0, slot=1)] = [Hangs()]
    handle = await start_step(client, step_input(run, parking()))
    shown = await until_shown(handle, "| parked |")
    (row,) = [line for line in shown.splitlines() if "| parked |" in line]
    assert (group_id(run) in row, "IntegrityError" in row) == (True, True)
    assert "slot 0: prompt " in shown
    await client.get_workflow_handle(group_id(run)).execute_update(PromptGroup.retry, asked(RetryGroup))
    shown = await until_shown(handle, ", 1 of 2 ")
    assert "parked" not in shown
    run.release.set()
    await handle.result()
