"""Workflows that began under an older version of the code go on under this one: recorded histories replay.

`ONBELAY_RECORD_HISTORIES=1 pytest tests/workflows/test_histories.py` records them again, from the same stories. That is
right only when a change of the workflows is meant to break running ones; otherwise guard it with `workflow.patched`.
"""

import asyncio
import base64
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle, WorkflowHistory, WorkflowUpdateFailedError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from activities.errors import AgentFailed, IntegrityError
from tests.workflows.building import (
    QUEUE,
    asked,
    evaluation_input,
    group_id,
    group_input,
    policy,
    rollout_id,
    run_input,
    start_group,
    start_run,
    start_step,
    step_input,
    until_ended,
    until_parked,
    until_shown,
)
from tests.workflows.changed_group import HesitantPromptGroup
from tests.workflows.fake_run import FakeRun, Hangs, Masked, Valid
from tests.workflows.fakes import WORKFLOWS, Fakes
from workflows.evaluation import Evaluation
from workflows.messages import (
    GroupResult,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    DropGroup,
    MaskRollouts,
    ResumeRun,
    RetryDroppedGroup,
    RetryGroup,
    SetBudget,
    SetFloor,
    StopRun,
)
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep

FOLDER = Path(__file__).parent / "histories"
RECORD = os.environ.get("ONBELAY_RECORD_HISTORIES") == "1"
DATA = IntegrityError("tokens contradict themselves")


async def group_with_a_retry(client: Client, run: FakeRun) -> WorkflowHistory:
    """An infrastructure failure, a data failure, a masked rollout, a group that is sealed."""
    run.script[rollout_id(run, 0)] = [AgentFailed("HTTP 500")]
    run.script[rollout_id(run, 1)] = [DATA]
    run.script[rollout_id(run, 2)] = [Masked("truncated")]
    chosen = policy(rollouts=3, backoff_base_s=0.1)
    handle = await start_group(client, run, group_input(run, chosen))
    await handle.result()
    return await handle.fetch_history()


async def group_that_was_parked(client: Client, run: FakeRun) -> WorkflowHistory:
    """A group that an operator masks."""
    handle = await parked_group(client, run, failures=2)
    await handle.execute_update(PromptGroup.mask, asked(MaskRollouts))
    await handle.result()
    return await handle.fetch_history()


async def group_that_was_retried(client: Client, run: FakeRun) -> WorkflowHistory:
    """A group that parks twice; an operator retries it, then retries it afresh."""
    handle = await parked_group(client, run, failures=4)
    await handle.execute_update(PromptGroup.retry, asked(RetryGroup))
    await run.until(lambda: run.count("seal_group") == 2)
    await until_parked(handle)
    await handle.execute_update(PromptGroup.retry, asked(RetryGroup, fresh=True))
    await handle.result()
    return await handle.fetch_history()


async def group_that_may_run_once(client: Client, run: FakeRun) -> WorkflowHistory:
    """A rollout that is lost with its first failure, beside one that settles with the versions and counts of calls."""
    run.runs_once = True
    run.script[rollout_id(run, 0)] = [AgentFailed("HTTP 500")]
    handle = await start_group(client, run, group_input(run, policy()))
    await handle.result()
    return await handle.fetch_history()


async def step(client: Client, run: FakeRun) -> WorkflowHistory:
    """A step that replaces a dropped group."""
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(rollouts=1, on_dropped_prompt="replace", max_skipped_prompts=1)
    handle = await start_step(client, step_input(run, chosen))
    await handle.result()
    return await handle.fetch_history()


async def step_that_samples_dynamically(client: Client, run: FakeRun) -> WorkflowHistory:
    """A step that sets two groups aside, one of them in the place of the other."""
    for slot in (0, 2):
        run.script |= {rollout_id(run, index, slot): [Valid(1.0)] for index in range(2)}
    handle = await start_step(client, step_input(run, policy(grpo={"use_dynamic_sampling": True})))
    assert (await handle.result()).set_aside == 2
    return await handle.fetch_history()


async def step_below_its_floor(client: Client, run: FakeRun) -> WorkflowHistory:
    """A step that parks, is refused a retry of what is not dropped, and goes on with a lower floor."""
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(rollouts=1, on_dropped_prompt="park", max_skipped_prompts=1)
    handle = await start_step(client, step_input(run, chosen))
    group = client.get_workflow_handle(group_id(run))
    await run.until(lambda: group_id(run) in run.groups)
    await until_parked(group)
    await group.execute_update(PromptGroup.drop, asked(DropGroup))
    await until_parked(handle)
    with suppress(WorkflowUpdateFailedError):
        await handle.execute_update(TrainingStep.retry_group, asked(RetryDroppedGroup, group_id=group_id(run, 1)))
    lower = chosen.failure.model_copy(update={"min_step_batch_fraction": 0.5})
    await handle.signal(TrainingStep.adopt, lower)
    await handle.result()
    return await handle.fetch_history()


async def step_with_a_retried_group(client: Client, run: FakeRun) -> WorkflowHistory:
    """A dropped group of an open step runs again."""
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    run.script[rollout_id(run, 0, 1)] = [Hangs()]
    chosen = policy(rollouts=1, max_skipped_prompts=1, min_step_batch_fraction=0.5)
    handle = await start_step(client, step_input(run, chosen))
    await until_shown(handle, "1 of 2 groups ended")
    await handle.execute_update(TrainingStep.retry_group, asked(RetryDroppedGroup, group_id=group_id(run)))
    run.release.set()
    await handle.result()
    return await handle.fetch_history()


async def step_that_was_drained(client: Client, run: FakeRun) -> WorkflowHistory:
    """A step that never has its turn."""
    handle = await start_step(client, step_input(run, policy(rollouts=1)), turn=False)
    await handle.signal(TrainingStep.drain)
    await handle.result()
    return await handle.fetch_history()


async def step_that_borrows(client: Client, run: FakeRun) -> WorkflowHistory:
    """It loses a group and trains one of the next step in its place."""
    await run_with_a_promotion(client, run)
    return await client.get_workflow_handle(f"{run.id}/step-0").fetch_history()


async def step_that_lends(client: Client, run: FakeRun) -> WorkflowHistory:
    """It gives a group away and runs a spare prompt."""
    await run_with_a_promotion(client, run)
    return await client.get_workflow_handle(f"{run.id}/step-1").fetch_history()


async def run_with_lookahead(client: Client, run: FakeRun) -> WorkflowHistory:
    """Two steps in flight, other budgets and another floor in between, and a stop that drains the second."""
    run.trainer = [Hangs()]
    chosen = policy(prompts=1, rollouts=1, ahead=1, grpo={"max_num_steps": 9})
    handle = await start_run(client, run_input(run, chosen))
    await run.until(lambda: run.count("train_step") == 1)
    await handle.execute_update(TrainingRun.set_budget, asked(SetBudget, max_skipped_prompts=3))
    await handle.execute_update(TrainingRun.set_floor, asked(SetFloor, min_step_batch_fraction=0.5))
    await handle.execute_update(TrainingRun.stop, asked(StopRun))
    run.release.set()
    await handle.result()
    return await handle.fetch_history()


async def run_that_was_paused(client: Client, run: FakeRun) -> WorkflowHistory:
    """It waits before its only step."""
    handle = await start_run(client, run_input(run, policy(prompts=1, grpo={"max_num_steps": 1}), paused=True))
    await run.until(lambda: run.states == [("paused", None)])
    await handle.execute_update(TrainingRun.resume, asked(ResumeRun))
    await handle.result()
    return await handle.fetch_history()


async def run_first_execution(client: Client, run: FakeRun) -> WorkflowHistory:
    """First weights, an evaluation, a step, continue-as-new."""
    handle = await finished_run(client, run)
    return await client.get_workflow_handle(run.id, run_id=handle).fetch_history()


async def run_last_execution(client: Client, run: FakeRun) -> WorkflowHistory:
    """The last step and the end of a run that was continued as new."""
    await finished_run(client, run)
    return await client.get_workflow_handle(run.id).fetch_history()


async def evaluation(client: Client, run: FakeRun) -> WorkflowHistory:
    """Two validation prompts."""
    handle = await client.start_workflow(
        Evaluation.run, evaluation_input(run, policy()), id=f"{run.id}/eval-0", task_queue=QUEUE
    )
    await handle.result()
    return await handle.fetch_history()


async def parked_group(client: Client, run: FakeRun, failures: int) -> WorkflowHandle[PromptGroup, GroupResult]:
    """A group that waits for an operator."""
    run.script[rollout_id(run, 0)] = [DATA] * failures
    handle = await start_group(client, run, group_input(run, policy(min_valid=2, on_dropped_prompt="park")))
    await until_parked(handle)
    return handle


async def run_with_a_promotion(client: Client, run: FakeRun) -> None:
    """Run two steps; a group of the second trains in the first."""
    run.gates[rollout_id(run, 0)] = asyncio.Event()
    run.script[rollout_id(run, 0)] = [DATA, DATA]
    chosen = policy(rollouts=1, ahead=1, grpo={"max_num_steps": 2}, on_dropped_prompt="replace", max_skipped_prompts=1)
    handle = await start_run(client, run_input(run, chosen))
    await run.until(lambda: {group_id(run, 0, 1), group_id(run, 1, 1)} <= set(run.ended))
    await until_ended(client, run, 1, 2)
    run.gates[rollout_id(run, 0)].set()
    await handle.result()
    assert run.metrics[0]["train/promoted_prompt_groups"] == 1


async def finished_run(client: Client, run: FakeRun) -> str | None:
    """Run two steps in two executions; the Temporal run id of the first one."""
    chosen = policy(prompts=1, grpo={"max_num_steps": 2, "val_at_start": True})
    handle = await start_run(client, run_input(run, chosen, steps_per_execution=1))
    await handle.result()
    return handle.first_execution_run_id


STORIES: dict[str, Callable[[Client, FakeRun], Awaitable[WorkflowHistory]]] = {
    story.__name__: story
    for story in (
        *(group_with_a_retry, group_that_was_parked, group_that_was_retried, group_that_may_run_once),
        *(step, step_that_samples_dynamically, step_below_its_floor, step_with_a_retried_group, step_that_was_drained),
        *(step_that_borrows, step_that_lends),
        *(run_first_execution, run_last_execution, run_with_lookahead, run_that_was_paused, evaluation),
    )
}


async def replay(history: WorkflowHistory, *changed: type) -> None:
    """Replay with today's workflows, or with others. Deadlock detection is off: the machine may be slow."""
    workflows = changed or WORKFLOWS
    replayer = Replayer(workflows=workflows, data_converter=pydantic_data_converter, debug_mode=True)
    await replayer.replay_workflow(history)


def without_stack_traces(part: Any) -> Any:
    """The history without the paths of the machine that recorded it."""
    if isinstance(part, dict):
        return {key: without_stack_traces(value) for key, value in part.items() if key != "stackTrace"}
    if isinstance(part, list):
        return [without_stack_traces(value) for value in part]
    return part


def recorded(name: str) -> WorkflowHistory:
    """A committed history."""
    return WorkflowHistory.from_json(name, (FOLDER / f"{name}.json").read_text())


@pytest.mark.integration
@pytest.mark.parametrize("name", STORIES)
async def test_what_happens_now_replays(real: Client, fakes: Fakes, name: str) -> None:
    history = await STORIES[name](real, fakes.new_run(f"golden-{name.replace('_', '-')}"))
    await replay(history)
    if RECORD:
        text = json.dumps(without_stack_traces(history.to_json_dict()), indent=0)
        (FOLDER / f"{name}.json").write_text(text + "\n")


@pytest.mark.parametrize("name", STORIES)
async def test_what_was_recorded_replays(name: str) -> None:
    await replay(recorded(name))


async def test_a_changed_workflow_does_not_replay() -> None:
    with pytest.raises(NondeterminismError):
        await replay(recorded("group_with_a_retry"), HesitantPromptGroup)


def test_the_recorded_run_was_continued_as_new() -> None:
    first, last = (recorded(name).to_json_dict()["events"] for name in ("run_first_execution", "run_last_execution"))
    assert first[-1]["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW"
    assert last[-1]["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED"


@pytest.mark.parametrize("name", STORIES)
def test_no_recorded_history_names_a_machine(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text()
    payloads = [base64.b64decode(data).decode() for data in re.findall(r'"data": "([^"]+)"', text)]
    assert payloads
    everything = "\n".join([text, *payloads])
    for pattern in (
        r"\d+@",
        r"/(root|home|tmp|work|Users)\b",
        r"\b127\.0\.0\.1\b",
        rf"\b{re.escape(socket.gethostname())}\b",
    ):
        assert not re.search(pattern, everything), pattern
