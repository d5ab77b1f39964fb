"""What an operator works on: a run whose workflows and ledger are real, and whose agents fail when a test says so.

No trainer and no endpoints are there: the run waits for its first weights, groups and steps are started by the test.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from temporalio import activity
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker
from typer.testing import CliRunner, Result

from activities.rollout_activities import rollout_result
from activities.run_context import RunContexts
from configs.load import dump_recipe
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.records import ActionRecord, GroupRecord, SettledRollout
from tests.storage.building import generated, selecting
from workers.cli.main import app
from workers.cli.session import Session
from workers.cli.starting import policy_of
from workers.cli.temporal_runs import is_open
from workers.rollout_worker import WORKFLOWS, deciding_activities
from workflows.messages import Failure, GroupInput, RolloutResult, RunRollout, StepInput, WeightsRef
from workflows.prompt_group import PromptGroup
from workflows.search_attributes import GROUP_STATE
from workflows.training_step import TrainingStep

DEADLINE_S = 180.0
ROLLOUTS = 3
_Seen = TypeVar("_Seen")
WHY = ("--reason", "the sandbox was full", "--actor", "ada")


@dataclass
class Operated:
    """The run `id` of a session; rollouts of `broken` indices fail, unless their slot is `sound`."""

    session: Session
    recipe_file: Path
    id: str
    broken: set[int] = field(default_factory=set[int])
    sound: set[int] = field(default_factory=set[int])

    @property
    def recipe(self) -> Recipe:
        return self.session.recipe

    @activity.defn(name="run_rollout")
    async def run_rollout(self, request: RunRollout) -> RolloutResult:
        """One attempt of one call: valid, or a failure of the infrastructure."""
        ledger, rollout_id = self.session.ledger, request.rollout_id
        begun = await ledger.rollouts.begin_attempt(
            rollout_id, "worker-1", recovery="replay", policy_version=0, max_replay_age_versions=0
        )
        if isinstance(begun, SettledRollout):
            return rollout_result(begun)
        if request.index in self.broken and request.slot not in self.sound:
            await ledger.rollouts.fail_attempt(
                rollout_id, begun.attempt, "agent", "infra", "AgentFailed", "HTTP 500 from http://u:pw-9@agent"
            )
            failure = Failure(
                run_id=self.id,
                group_id=request.group_id,
                rollout_id=rollout_id,
                attempt=begun.attempt,
                boundary="agent",
                bucket="infra",
                failure_class="AgentFailed",
                cause="HTTP 500",
            )
            raise ApplicationError("AgentFailed", failure, type="AgentFailed", non_retryable=True)
        lease = await ledger.calls.claim(rollout_id, begun.attempt, "request")
        if lease.recorded is None:
            await ledger.calls.record(lease, generated())
        settlement = selecting(rollout_id, begun.attempt, (lease.ordinal,), reward=0.5)
        return rollout_result(await ledger.rollouts.settle(settlement))

    async def onbelay(self, *arguments: str) -> Result:
        """A command, against the servers of the session."""
        command = [*arguments, "--recipe", str(self.recipe_file)]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    async def ok(self, *arguments: str) -> str:
        """A command that must succeed; its standard output."""
        result = await self.onbelay(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    async def refused(self, *arguments: str) -> str:
        """A command that must be refused; what it says."""
        result = await self.onbelay(*arguments)
        assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
        return result.output

    async def json(self, *arguments: str) -> Any:
        """A command that must succeed; its JSON."""
        return json.loads(await self.ok(*arguments, "--json"))

    async def start_group(self, slot: int = 0, *, samples_dynamically: bool = False) -> WorkflowHandle[Any, Any]:
        """Start a group of step 0. All its valid rollouts have the same reward."""
        failure = self.recipe.failure.model_copy(update={"on_dropped_prompt": "park"})
        grpo = self.recipe.grpo.model_copy(update={"use_dynamic_sampling": samples_dynamically})
        policy = policy_of(self.recipe).model_copy(update={"failure": failure, "grpo": grpo})
        return await self.session.client.start_workflow(
            PromptGroup.run,
            GroupInput(
                run_id=self.id,
                step=0,
                slot=slot,
                purpose="train",
                prompt_id=f"p{slot}",
                row_index=0,
                num_rollouts=ROLLOUTS,
                min_valid_rollouts=2,
                weights=self.weights,
                policy=policy,
                task_queue=self.recipe.temporal.task_queue,
            ),
            id=f"{self.id}/step-0/group-{slot}",
            task_queue=self.recipe.temporal.task_queue,
        )

    async def start_step(self) -> WorkflowHandle[Any, Any]:
        """Start step 0; it never gets its turn to train."""
        return await self.session.client.start_workflow(
            TrainingStep.run,
            StepInput(
                run_id=self.id,
                step=0,
                weights=self.weights,
                policy=policy_of(self.recipe),
                task_queue=self.recipe.temporal.task_queue,
            ),
            id=f"{self.id}/step-0",
            task_queue=self.recipe.temporal.task_queue,
        )

    @property
    def weights(self) -> WeightsRef:
        return WeightsRef(version=0, path="/weights/policy-0", digest="d" * 64)

    async def group(self, state: str, slot: int = 0) -> GroupRecord:
        """A group of step 0, once it is in a state, and its workflow takes requests as such, or is closed."""
        group_id = f"{self.id}/step-0/group-{slot}"

        async def there() -> GroupRecord | None:
            groups = await self.session.ledger.groups.list(self.id, step=0, purpose="train")
            found = next((group for group in groups if group.group_id == group_id and group.state == state), None)
            return found if found is not None and await self._stands(group_id, parked=state == "parked") else None

        return await until(there)

    async def _stands(self, group_id: str, *, parked: bool) -> bool:
        description = await self.session.client.get_workflow_handle(group_id).describe()
        if parked:
            return description.typed_search_attributes.get(GROUP_STATE) == "parked"
        return description.status != WorkflowExecutionStatus.RUNNING

    async def closed(self) -> None:
        """Wait until Temporal runs the run no more."""

        async def seen() -> bool | None:
            return None if await is_open(self.session, self.id) else True

        await until(seen)

    async def audit(self) -> list[tuple[str, str, str]]:
        """Verb, outcome and actor of every request so far."""
        actions: list[ActionRecord] = await self.session.ledger.actions.list(self.id)
        return [(action.verb, action.outcome, action.actor) for action in actions]


async def until(seen: Callable[[], Awaitable[_Seen | None]]) -> _Seen:
    """Wait for something to be there."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await seen()
            if found is not None:
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def operated(session: Session, run_id: str, folder: Path) -> AsyncIterator[Operated]:
    """Workers for the decisions, the ledger and the rollouts of a run."""
    recipe_file = folder / "servers.yaml"
    recipe_file.write_text(dump_recipe(session.recipe, reveal_secrets=True))
    run = Operated(session, recipe_file, run_id)
    ledger, blobs = session.ledger, BlobStore(session.recipe.storage.blobs_url)
    queue = session.recipe.temporal.task_queue
    deciding = deciding_activities(ledger, blobs, RunContexts(ledger))
    async with AsyncExitStack() as workers:
        for worker in (
            Worker(session.client, task_queue=queue, workflows=WORKFLOWS, activities=deciding),
            Worker(session.client, task_queue=f"{queue}-rollouts", activities=[run.run_rollout]),
        ):
            await workers.enter_async_context(worker)
        yield run
