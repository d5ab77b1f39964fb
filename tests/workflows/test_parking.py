"""A parked group waits for an operator; every request is audited, a refused one, too, and a refusal changes nothing."""

import asyncio
import uuid

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client, WorkflowHandle, WorkflowQueryFailedError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from activities.errors import AgentFailed, IntegrityError
from tests.workflows.building import group_id, group_input, policy, rollout_id, start_group, until_parked
from tests.workflows.fake_run import FakeRun, Hangs, Masked, Outcome, Valid
from workflows.messages import (
    GroupResult,
    LoseRollout,
    RunRollout,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    DropGroup,
    LeverDone,
    LeverPreview,
    MaskRollouts,
    RetryGroup,
)

DATA = IntegrityError("tokens contradict themselves")
INFRA = AgentFailed("HTTP 500")
Handle = WorkflowHandle[PromptGroup, GroupResult]

RETRY = RetryGroup(actor="ann", reason="gym fixed")
DROP = DropGroup(actor="ben", reason="the prompt is broken")


def mask(*rollouts: int) -> MaskRollouts:
    """A request of ann's."""
    return MaskRollouts(actor="ann", reason="one is enough", rollouts=rollouts)


async def started(
    client: Client, run: FakeRun, *scripts: list[Outcome], min_valid: int = 1, **failure: object
) -> Handle:
    """A group that parks rather than being dropped; one script for each rollout."""
    for index, script in enumerate(scripts):
        run.script[rollout_id(run, index)] = script
    settings = {"on_dropped_prompt": "park", "park_timeout_s": 3600, "backoff_base_s": 0.01, **failure}
    chosen = policy(rollouts=len(scripts), min_valid=min_valid, **settings)
    return await start_group(client, run, group_input(run, chosen))


async def parked_group(
    client: Client, run: FakeRun, *scripts: list[Outcome], min_valid: int = 1, **failure: object
) -> Handle:
    """A group that is parked."""
    handle = await started(client, run, *scripts, min_valid=min_valid, **failure)
    await until_parked(handle)
    return handle


async def retried(handle: Handle, *, fresh: bool = False) -> LeverDone:
    """The answer to a retry."""
    request = RETRY.model_copy(update={"fresh": fresh})
    return await handle.execute_update("retry", request, result_type=LeverDone)


async def dropped(handle: Handle) -> LeverDone:
    """The answer to a drop."""
    return await handle.execute_update("drop", DROP, result_type=LeverDone)


async def masked(handle: Handle, *rollouts: int) -> LeverDone:
    """The answer to a mask."""
    return await handle.execute_update("mask", mask(*rollouts), result_type=LeverDone)


async def refusal(handle: Handle, update: str, argument: object) -> ApplicationError:
    """Why an update is refused."""
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update(update, argument)
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


def audited(run: FakeRun) -> list[tuple[str, str, str, str]]:
    """Verb, outcome, actor and reason of every request."""
    return [(action.verb, action.outcome, action.actor, action.reason) for action in run.audit.values()]


async def test_a_parked_group_is_written_with_its_reason(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    stored = run.groups[group_id(run)]
    assert stored.bucket == "data"
    assert "prompt prompt-a: 0 of 1 rollouts are valid" in (stored.reason or "")
    await dropped(handle)


async def test_retry_runs_the_lost_rollouts_with_fresh_budgets(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA, DATA], [], min_valid=2)
    answer = await retried(handle)
    assert (answer.target, answer.verb, answer.changed, answer.state) == (group_id(run), "retry", True, "open")
    result = await handle.result()
    assert (result.state, result.valid, result.reason) == ("sealed", 2, None)
    assert [run.attempts[rollout_id(run, index)] for index in (0, 1)] == [4, 1]
    assert audited(run) == [("retry", "done", "ann", "gym fixed")]


async def test_a_fresh_retry_replays_nothing_of_the_lost_attempts(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA, INFRA], [], min_valid=2)
    await retried(handle, fresh=True)
    assert (await handle.result()).state == "sealed"
    requests = [call.request for call in run.calls_of("run_rollout")]
    tries = [request.fresh_after for request in requests if isinstance(request, RunRollout) and request.index == 0]
    assert tries == [None, None, 1, 1]
    (action,) = run.audit.values()
    assert action.arguments == {"fresh": True}


async def test_a_group_that_fails_again_parks_again(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA] * 4)
    await retried(handle)
    await run.until(lambda: run.count("seal_group") == 2)
    await until_parked(handle)
    await retried(handle)
    assert (await handle.result()).state == "sealed"


async def test_an_operator_s_drop_touches_no_budget_and_names_the_operator(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    answer = await dropped(handle)
    assert (answer.changed, answer.state) == (True, "dropped")
    result = await handle.result()
    assert (result.state, result.bucket, result.budgets.skipped_prompts) == ("dropped", None, 0)
    assert (result.reason or "").endswith("; dropped by ben: the prompt is broken")
    stored = run.groups[group_id(run)]
    assert (stored.state, stored.bucket, stored.reason) == ("dropped", None, result.reason)


async def test_mask_without_indices_trains_what_is_valid(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA], [], min_valid=2)
    assert (await masked(handle)).state == "sealed"
    result = await handle.result()
    assert (result.state, result.valid, result.masked, result.lost) == ("sealed", 1, 1, 0)
    stored = run.groups[group_id(run)]
    assert (stored.state, stored.settled[0].reason) == ("sealed", "masked by ann: one is enough")


async def test_a_group_stays_parked_until_the_rules_are_satisfied(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA] * 2, [DATA] * 2, [], on_lost_rollout="drop_group")
    assert (await masked(handle, 0)).state == "parked"
    await run.until(lambda: run.groups[group_id(run)].settled[0].state == "masked")
    again = await masked(handle, 0)
    assert (again.changed, again.state) == (False, "parked")
    assert (await masked(handle, 1)).state == "sealed"
    result = await handle.result()
    assert (result.state, result.valid, result.masked, result.lost) == ("sealed", 1, 2, 0)
    assert [action.outcome for action in run.audit.values()] == ["done", "unchanged", "done"]


async def test_evidence_is_never_masked(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA], [], min_valid=2)
    refused = await refusal(handle, "mask", mask(1))
    assert refused.message == f"rollout 1 of {group_id(run)} is valid: the evidence is sealed and stands"
    assert run.groups[group_id(run)].settled[1].state == "valid"
    await dropped(handle)


async def test_an_open_rollout_that_is_masked_stops_and_the_group_goes_on(client: Client, run: FakeRun) -> None:
    handle = await started(client, run, [Hangs()], [])
    await run.until(lambda: run.is_settled(group_id(run), 1))
    assert (await masked(handle, 0)).state == "open"
    result = await handle.result()
    assert (result.state, result.valid, result.masked) == ("sealed", 1, 1)
    assert run.groups[group_id(run)].settled[0].reason == "masked by ann: one is enough"


async def test_mask_of_an_open_group_seals_it_with_what_is_valid(client: Client, run: FakeRun) -> None:
    handle = await started(client, run, [Hangs()], [], [Hangs()], min_valid=2)
    await run.until(lambda: run.count("run_rollout") == 3 and run.is_settled(group_id(run), 1))
    while "done" not in [action.outcome for action in run.audit.values()]:  # the workflow may not have seen it yet
        try:
            await masked(handle)
        except WorkflowUpdateFailedError:
            await asyncio.sleep(0.02)
    result = await handle.result()
    assert (result.state, result.valid, result.masked) == ("sealed", 1, 2)


async def test_an_open_group_is_dropped_and_its_rollouts_stop(client: Client, run: FakeRun) -> None:
    handle = await started(client, run, [Hangs()], [])
    await run.until(lambda: run.count("run_rollout") == 2)
    await dropped(handle)
    result = await handle.result()
    assert (result.state, result.bucket, result.reason) == ("dropped", None, "dropped by ben: the prompt is broken")
    assert run.attempts[rollout_id(run, 0)] == 1


async def test_an_open_group_is_not_retried(client: Client, run: FakeRun) -> None:
    handle = await started(client, run, [Hangs()])
    await run.until(lambda: run.count("run_rollout") == 1)
    refused = await refusal(handle, "retry", RETRY)
    assert (refused.type, refused.non_retryable) == ("LeverRefused", True)
    assert f"{group_id(run)} is open, not parked" in refused.message
    assert audited(run) == [("retry", "refused", "ann", "gym fixed")]
    await dropped(handle)


async def test_of_two_operators_the_second_sees_the_state_after_the_first(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA], [], min_valid=2)
    run.audit_is_slow.set()
    first = asyncio.create_task(masked(handle))
    await run.until(lambda: run.count("record_action") == 1)
    second = asyncio.create_task(refusal(handle, "drop", DROP))
    await run.until(lambda: run.count("record_action") == 2)
    assert run.groups[group_id(run)].state == "parked"
    run.audit_is_slow.clear()
    assert (await first).state == "sealed"
    assert "is sealed: its evidence stands" in (await second).message
    assert (await handle.result()).state == "sealed"
    assert {(action.verb, action.outcome) for action in run.audit.values()} == {("mask", "done"), ("drop", "refused")}


async def test_the_same_request_twice_changes_nothing_the_second_time(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    run.ledger_is_slow.set()
    first, second = await dropped(handle), await dropped(handle)
    run.ledger_is_slow.clear()
    assert (first.changed, second.changed) == (True, False)
    assert (await handle.result()).state == "dropped"
    assert [action.outcome for action in run.audit.values()] == ["done", "unchanged"]


async def test_a_refusal_changes_nothing(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    before = run.groups[group_id(run)].settled.copy()
    refused = await refusal(handle, "mask", mask())
    assert "has no valid rollout to train: retry or drop it" in refused.message
    assert (run.groups[group_id(run)].state, run.groups[group_id(run)].settled) == ("parked", before)
    assert run.count("seal_group") == 1
    assert audited(run) == [("mask", "refused", "ann", "one is enough")]
    await dropped(handle)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"actor": "ann", "reason": " "}, "reason is blank"),
        ({"actor": "", "reason": "why"}, "actor is blank"),
        ({"actor": "ann", "reason": "why\0"}, "reason has a NUL character"),
        ({"actor": "ann", "reason": "x" * 2001}, "reason has 2001 characters; at most 2000 are kept"),
    ],
)
async def test_a_request_without_a_name_or_a_reason_leaves_no_trace(
    client: Client, run: FakeRun, argument: dict[str, str], text: str
) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    assert text in (await refusal(handle, "retry", argument)).message
    assert not run.audit
    await dropped(handle)


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ({"actor": "ann", "reason": "why", "frsh": True}, "frsh"),
        ({"actor": "ann"}, "reason"),
        ({"actor": "ann", "reason": "why", "fresh": "maybe"}, "fresh"),
    ],
    ids=["unknown key", "missing key", "wrong type"],
)
async def test_a_request_that_cannot_be_read_changes_nothing_and_says_which_key(
    client: Client, run: FakeRun, argument: dict[str, object], key: str
) -> None:
    handle = await parked_group(client, run, [DATA, DATA])
    error: BaseException | None = await refusal(handle, "retry", argument)
    texts: list[str] = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    assert f"\n{key}\n" in texts[-1]
    assert not run.audit
    assert run.groups[group_id(run)].state == "parked"
    await dropped(handle)


async def test_a_preview_says_what_would_happen_and_changes_nothing(client: Client, run: FakeRun) -> None:
    handle = await parked_group(client, run, [DATA, DATA], [], min_valid=2)
    said = await handle.query(PromptGroup.preview, LeverPreview(verb="retry", arguments={}))
    assert said.startswith(f"runs rollout 0 of {group_id(run)} again with fresh budgets")
    with pytest.raises(WorkflowQueryFailedError, match=r"rollout 1 of .* is valid"):
        await handle.query(PromptGroup.preview, LeverPreview(verb="mask", arguments={"rollouts": [1]}))
    with pytest.raises(WorkflowQueryFailedError, match="no verb 'abandon' here; there are: drop, mask, retry"):
        await handle.query(PromptGroup.preview, LeverPreview(verb="abandon", arguments={}))
    assert (run.groups[group_id(run)].state, run.audit) == ("parked", {})
    await dropped(handle)


async def test_a_cancelled_parked_group_is_dropped(real: Client, run: FakeRun) -> None:
    handle = await parked_group(real, run, [DATA, DATA])
    await handle.cancel()
    await run.until(lambda: run.groups[group_id(run)].state == "dropped")
    assert (run.groups[group_id(run)].bucket, run.groups[group_id(run)].reason) == (None, "cancelled")


async def test_a_validation_group_never_waits_for_an_operator(client: Client, run: FakeRun) -> None:
    run.script[f"{run.id}/eval-0/group-0/rollout-0"] = [Masked("truncated")]
    chosen = policy(rollouts=1, on_dropped_prompt="park")
    result = await (await start_group(client, run, group_input(run, chosen, "validation"))).result()
    assert result.state == "dropped"


async def test_a_diagnostic_copy_never_waits_for_an_operator(client: Client, run: FakeRun) -> None:
    copy_id = f"{group_id(run)}/replay-1"
    run.script[f"{copy_id}/rollout-0"] = [DATA, DATA]
    run.script[f"{copy_id}/rollout-1"] = [Valid(0.5)]
    group = group_input(run, policy(min_valid=2, on_dropped_prompt="park"), "diagnostic")
    handle = await client.start_workflow(PromptGroup.run, group, id=copy_id, task_queue=group.task_queue)
    result = await handle.result()
    assert (result.state, result.valid, result.lost) == ("dropped", 1, 1)
    assert result.budgets.skipped_prompts == 0


async def test_a_lost_rollout_of_an_open_group_is_masked(client: Client, run: FakeRun) -> None:
    """Where a lost rollout costs the group, an operator keeps it while its siblings still run."""
    handle = await started(client, run, [DATA, DATA], [Hangs()], on_lost_rollout="drop_group")
    await run.until(lambda: run.is_settled(group_id(run), 0))
    await masked(handle, 0)
    run.release.set()
    result = await handle.result()
    assert (result.state, result.valid, result.masked, result.lost) == ("sealed", 1, 1, 0)
    given_up = [call.request for call in run.calls_of("lose_rollout")]
    assert [request.state for request in given_up if isinstance(request, LoseRollout)] == ["lost", "masked"]


async def test_a_reset_repeats_neither_a_rollout_nor_an_audit_entry(real: Client, run: FakeRun) -> None:
    """`temporal workflow reset` to the first task: the ledger has what is settled, and requests come again by id."""
    handle = await parked_group(real, run, [DATA, DATA], [], min_valid=2)
    await retried(handle)
    assert (await handle.result()).state == "sealed"
    before = dict(run.attempts)
    first_task = next(
        event.event_id
        for event in (await handle.fetch_history()).events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    )
    await real.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=real.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id),
            reason="a test",
            workflow_task_finish_event_id=first_task,
            request_id=uuid.uuid4().hex,
        )
    )
    again = await real.get_workflow_handle_for(PromptGroup.run, handle.id).result()
    assert (again.state, again.valid) == ("sealed", 2)
    assert run.attempts == before
    assert len(run.audit) == 1
