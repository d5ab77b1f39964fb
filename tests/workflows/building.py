"""Inputs of workflows: small groups, fast defaults, one place to change a budget."""

import asyncio
from contextlib import suppress
from typing import Any, TypeVar

from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.testing import WorkflowEnvironment

from configs.failure import FailureConfig
from configs.generation import GenerationConfig
from configs.grpo import GrpoConfig
from configs.rollouts import RolloutsConfig
from configs.training import TrainingConfig
from tests.workflows.fake_run import DEADLINE_S, FakeRun
from workflows.messages import (
    EvaluationInput,
    GroupInput,
    GroupResult,
    Purpose,
    RunInput,
    RunPolicy,
    RunResult,
    StepInput,
    StepResult,
)
from workflows.prompt_group import PromptGroup
from workflows.requests import (
    Lever,
)
from workflows.search_attributes import GROUP_STATE
from workflows.training_run import TrainingRun
from workflows.training_step import TrainingStep

Result = TypeVar("Result")
Request = TypeVar("Request", bound=Lever)

QUEUE = "onbelay-test"


def policy(
    *,
    prompts: int = 2,
    rollouts: int = 2,
    min_valid: int = 1,
    grpo: dict[str, Any] | None = None,
    training: TrainingConfig | None = None,
    ahead: int = 0,
    **failure: Any,
) -> RunPolicy:
    """A policy that samples `ahead` steps ahead; keywords are keys of the section `failure`."""
    return RunPolicy(
        grpo=GrpoConfig(num_prompts_per_step=prompts, num_generations_per_prompt=rollouts, **(grpo or {})),
        rollouts=RolloutsConfig(
            min_valid_rollouts_per_group=min_valid,
            max_lookahead_versions=ahead,
            max_replay_age_versions=max(1, ahead),
        ),
        failure=FailureConfig(**failure),
        generation=GenerationConfig(max_refit_attempts=2),
        training=training or TrainingConfig(),
    )


def group_input(run: FakeRun, chosen: RunPolicy, purpose: Purpose = "train") -> GroupInput:
    """The group of slot 0 of step 0. Its id is `group_id(run)`."""
    return GroupInput(
        run_id=run.id,
        step=0,
        slot=0,
        purpose=purpose,
        prompt_id="prompt-a",
        row_index=0,
        num_rollouts=chosen.grpo.num_generations_per_prompt,
        min_valid_rollouts=chosen.rollouts.min_valid_rollouts_per_group,
        weights=run.weights(0),
        policy=chosen,
        task_queue=QUEUE,
    )


def group_id(run: FakeRun, slot: int = 0, step: int = 0) -> str:
    """Id of a group of a run."""
    return f"{run.id}/step-{step}/group-{slot}"


def rollout_id(run: FakeRun, index: int, slot: int = 0, step: int = 0) -> str:
    """Id of a rollout of a run."""
    return f"{group_id(run, slot, step)}/rollout-{index}"


def step_input(run: FakeRun, chosen: RunPolicy, step: int = 0) -> StepInput:
    """A step of a run whose policy is at version 0."""
    return StepInput(run_id=run.id, step=step, weights=run.weights(0), policy=chosen, task_queue=QUEUE)


def run_input(run: FakeRun, chosen: RunPolicy, **state: Any) -> RunInput:
    """A new run; keywords are state that an earlier execution left."""
    return RunInput(run_id=run.id, policy=chosen, task_queue=QUEUE, **state)


def evaluation_input(run: FakeRun, chosen: RunPolicy) -> EvaluationInput:
    """An evaluation of policy version 0."""
    return EvaluationInput(run_id=run.id, weights=run.weights(0), policy=chosen, task_queue=QUEUE)


async def start_group(client: Client, run: FakeRun, group: GroupInput) -> WorkflowHandle[PromptGroup, GroupResult]:
    """Start the PromptGroup workflow of a group."""
    prefix = f"eval-{group.weights.version}" if group.purpose == "validation" else f"step-{group.step}"
    workflow_id = f"{run.id}/{prefix}/group-{group.slot}"
    return await client.start_workflow(PromptGroup.run, group, id=workflow_id, task_queue=QUEUE)


async def start_step(client: Client, step: StepInput, *, turn: bool = True) -> WorkflowHandle[TrainingStep, StepResult]:
    """Start the TrainingStep workflow of a step; it has its turn, unless said otherwise."""
    workflow_id = f"{step.run_id}/step-{step.step}"
    handle = await client.start_workflow(TrainingStep.run, step, id=workflow_id, task_queue=QUEUE)
    if turn:
        await handle.signal(TrainingStep.take_turn, step.weights)
    return handle


async def start_run(client: Client, run: RunInput) -> WorkflowHandle[TrainingRun, RunResult]:
    """Start the TrainingRun workflow of a run."""
    return await client.start_workflow(TrainingRun.run, run, id=run.run_id, task_queue=QUEUE)


async def until_parked(handle: WorkflowHandle[Any, Any]) -> None:
    """Wait until the group's search attribute says so, as an operator would."""
    async with asyncio.timeout(DEADLINE_S):
        while (await handle.describe()).typed_search_attributes.get(GROUP_STATE) != "parked":
            await asyncio.sleep(0.02)


async def until_closed(client: Client, workflow_id: str) -> None:
    """Wait until a workflow no longer runs, however it ended."""
    async with asyncio.timeout(DEADLINE_S):
        with suppress(WorkflowFailureError):
            await client.get_workflow_handle(workflow_id).result()


def asked(kind: type[Request], **arguments: Any) -> Request:
    """An operator's request."""
    return kind(actor="ada", reason="a test", **arguments)


def request(**arguments: Any) -> dict[str, Any]:
    """The same as an operator's client sends it."""
    return {"actor": "ada", "reason": "a test", **arguments}


async def until_shown(handle: WorkflowHandle[Any, Any], text: str) -> str:
    """Wait until the workflow's current details say something; the details."""
    async with asyncio.timeout(DEADLINE_S):
        while text not in (shown := await details_of(handle)):
            await asyncio.sleep(0.02)
    return shown


async def until_ended(client: Client, run: FakeRun, step: int, count: int) -> None:
    """Wait until a step knows that so many of its groups ended; the ledger knows it a little earlier."""
    await until_shown(client.get_workflow_handle(f"{run.id}/step-{step}"), f", {count} of ")


async def details_of(handle: WorkflowHandle[Any, Any]) -> str:
    """The Markdown of the UI's user metadata tab, without the space that it needs between columns."""
    metadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    return metadata.current_details.replace("\N{EM SPACE}", "")


async def result_later(env: WorkflowEnvironment, handle: WorkflowHandle[Any, Result], seconds: float) -> Result:
    """The result, with time passed although an activity runs (otherwise the service waits for it)."""
    waiting = asyncio.create_task(handle.result())
    await env.sleep(seconds)
    return await waiting


def root_cause(error: BaseException) -> BaseException:
    """The error at the bottom of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
