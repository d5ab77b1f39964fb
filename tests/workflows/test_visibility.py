"""What a person sees in Temporal without another tool: search attributes, summaries, a table of what happened."""

import asyncio
import uuid

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle

from activities.errors import IntegrityError
from tests.workflows.building import (
    details_of,
    group_id,
    group_input,
    policy,
    request,
    rollout_id,
    run_input,
    start_group,
    start_run,
    until_parked,
    until_shown,
)
from tests.workflows.fake_run import DEADLINE_S, FakeRun, Hangs, Masked
from tests.workflows.fakes import Fakes
from workflows.messages import Failure, GroupResult
from workflows.prompt_group import PromptGroup
from workflows.search_attributes import (
    FAILURE_CLASS,
    GROUP_STATE,
    LOST_ROLLOUTS,
    MASKED_ROLLOUTS,
    POLICY_VERSION,
    PROMPT_ID,
    RUN_ID,
    TRAIN_STEP,
    VALID_ROLLOUTS,
)

pytestmark = pytest.mark.integration

DATA = IntegrityError("tokens contradict | themselves\nbadly")


@pytest.fixture(scope="module")
async def eventful(real: Client, fakes: Fakes) -> FakeRun:
    """A run that ended: one step with a lost, a masked and two valid rollouts in its first group."""
    run = fakes.new_run(f"run-{uuid.uuid4().hex[:8]}")
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 1)] = [Masked("truncated")]
    await (await start_run(real, run_input(run, policy(rollouts=4, grpo={"max_num_steps": 1})))).result()
    return run


async def test_a_group_shows_its_rollouts(real: Client, eventful: FakeRun) -> None:
    handle = real.get_workflow_handle(f"{eventful.id}/step-0/group-0")
    description = await handle.describe()
    shown = description.typed_search_attributes
    assert shown.get(RUN_ID) == eventful.id
    assert (shown.get(TRAIN_STEP), shown.get(POLICY_VERSION)) == (0, 0)
    assert (shown.get(PROMPT_ID), shown.get(GROUP_STATE)) == ("train-prompt-0", "sealed")
    assert [shown.get(key) for key in (VALID_ROLLOUTS, MASKED_ROLLOUTS, LOST_ROLLOUTS)] == [2, 1, 1]
    assert shown.get(FAILURE_CLASS) == ["IntegrityError"]
    assert await description.static_summary() == "prompt train-prompt-0, step 0"
    assert (await details_of(handle)).splitlines() == [
        "**sealed**",
        "",
        "| rollout | state | attempts | class | turns | replayed / generated | reward | policy |",
        "|" + " --- |" * 8,
        "| 0 | lost | 2 | IntegrityError | 0 | 0 / 0 |  |  |",
        "| 1 | masked | 1 |  | 4 | 0 / 4 |  | 0 |",
        "| 2 | valid | 1 |  | 4 | 0 / 4 | 0.000 | 0 |",
        "| 3 | valid | 1 |  | 4 | 0 / 4 | 1.000 | 0 |",
        "",
        "- rollout 0: IntegrityError (model): tokens contradict \\| themselves badly",
        "- rollout 1: truncated",
    ]


async def test_a_step_shows_its_groups(real: Client, eventful: FakeRun) -> None:
    handle = real.get_workflow_handle(f"{eventful.id}/step-0")
    text = await details_of(handle)
    assert text.startswith("**applied**, 2 of 2 groups ended")
    name = f"{eventful.id}/step-0/group-0"
    assert f"| 0 | `{name}` | sealed | train-prompt-0 | IntegrityError | 2 / 1 / 1 | 0.500 |" in text
    assert (await handle.describe()).typed_search_attributes.get(TRAIN_STEP) == 0


async def test_a_run_shows_its_steps(real: Client, eventful: FakeRun) -> None:
    handle = real.get_workflow_handle(eventful.id)
    text = await details_of(handle)
    assert text.startswith("**completed**, step 1 of 1")
    assert "| 0 | 0.500 | 2 | 0 | policy-1 |" in text
    shown = (await handle.describe()).typed_search_attributes
    assert (shown.get(TRAIN_STEP), shown.get(POLICY_VERSION)) == (0, 0)


async def test_groups_are_found_by_what_went_wrong(real: Client, eventful: FakeRun) -> None:
    query = (
        f'TrainingRunId="{eventful.id}" AND FailureClass="IntegrityError" AND LostRollouts > 0 AND GroupState="sealed"'
    )
    found: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while not found:
            found = [execution.id async for execution in real.list_workflows(query)]
            await asyncio.sleep(0.05)
    assert found == [f"{eventful.id}/step-0/group-0"]


async def parked_group(client: Client, run: FakeRun) -> WorkflowHandle[PromptGroup, GroupResult]:
    """A group with a lost and a valid rollout that waits for an operator."""
    run.script[rollout_id(run, 0)] = [DATA, DATA, Hangs()]
    chosen = policy(min_valid=2, on_dropped_prompt="park", park_timeout_s=3600)
    handle = await start_group(client, run, group_input(run, chosen))
    await until_parked(handle)
    return handle


async def test_a_parked_group_says_what_can_be_done_and_until_when(real: Client, run: FakeRun) -> None:
    handle = await parked_group(real, run)
    text = await until_shown(handle, "**parked**")
    assert text.startswith("**parked**: prompt prompt-a: 1 of 2 rollouts are valid, 2 are needed")
    assert "| 0 | lost | 2 | IntegrityError |" in text
    assert "Waits for an operator until 2" in text
    for command in ("retry ID", "mask ID --rollout I", "mask ID --all", "drop ID"):
        assert f"`onbelay group {command.replace('ID', group_id(run))} --reason WHY`" in text
    await handle.execute_update("drop", request())
    await handle.result()
    assert "Waits for an operator" not in await details_of(handle)


async def test_state_and_class_stay_right_through_a_retry(real: Client, run: FakeRun) -> None:
    handle = await parked_group(real, run)
    assert await shown(handle) == ("parked", ["IntegrityError"], 1, 1)
    await handle.execute_update("retry", request())
    await run.until(lambda: run.attempts[rollout_id(run, 0)] == 3)
    assert await shown(handle) == ("open", ["IntegrityError"], 1, 0)
    run.release.set()
    await handle.result()
    assert await shown(handle) == ("sealed", ["IntegrityError"], 2, 0)


async def shown(handle: WorkflowHandle[PromptGroup, GroupResult]) -> tuple[str | None, list[str], float, float]:
    """State, classes, valid and lost rollouts, as a list view has them."""
    found = (await handle.describe()).typed_search_attributes
    return (
        found.get(GROUP_STATE),
        list(found.get(FAILURE_CLASS) or ()),
        found.get(VALID_ROLLOUTS) or 0,
        found.get(LOST_ROLLOUTS) or 0,
    )


async def test_updates_explain_themselves(real: Client, run: FakeRun) -> None:
    handle = await parked_group(real, run)
    metadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    explained = {update.name: update.description for update in metadata.definition.update_definitions}
    assert set(explained) == {"retry", "drop", "mask"}
    assert all('Input: {"actor": "who asks", "reason": "why"' in text for text in explained.values())
    queries = {query.name: query.description for query in metadata.definition.query_definitions}
    assert "without doing it" in queries["preview"]
    await handle.execute_update("drop", request())


async def test_an_activity_s_summary_names_prompt_rollout_and_attempt(real: Client, eventful: FakeRun) -> None:
    history = await real.get_workflow_handle(f"{eventful.id}/step-0/group-0").fetch_history()
    summaries = [
        real.data_converter.payload_converter.from_payload(event.user_metadata.summary, str)
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED and event.user_metadata.summary.data
    ]
    tries = [summary for summary in summaries if "rollout 0" in summary]
    assert len(tries) == 2
    for attempt, summary in enumerate(tries):
        assert "train-prompt-0" in summary
        assert f"attempt {attempt}" in summary


async def test_a_failed_activity_says_class_and_boundary_first_and_carries_the_ids(
    real: Client, eventful: FakeRun
) -> None:
    history = await real.get_workflow_handle(f"{eventful.id}/step-0/group-0").fetch_history()
    failed = [
        event.activity_task_failed_event_attributes.failure
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED
    ]
    assert len(failed) == 2
    for attempt, failure in enumerate(failed):
        assert failure.message.startswith("IntegrityError at the model boundary: ")
        (detail,) = failure.application_failure_info.details.payloads
        carried = real.data_converter.payload_converter.from_payload(detail, Failure)
        assert (carried.rollout_id, carried.attempt) == (rollout_id(eventful, 0), attempt)
