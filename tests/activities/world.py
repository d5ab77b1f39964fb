"""Short ways to write what a test's story needs: a run, its activities, its rollouts."""

import dataclasses
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.generation.vllm import VllmServer
from activities.group_activities import GroupActivities
from activities.ledger_activities import LedgerActivities
from activities.operator_activities import OperatorActivities
from activities.rollout_activities import RolloutActivities
from activities.rollouts.dataset import scan
from activities.rollouts.gym_agent import GymAgents
from activities.run_context import RunContexts
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.ledger import Ledger
from storage.records import AttemptRecord, GroupRecord, RolloutRecord
from storage.trainer_leases import TrainerLease
from tests.activities.model_server import ModelServer
from tests.generation.fake_vllm import FakeVllm
from tests.rollouts.agent_server import AgentServer
from tests.rollouts.building import answer, item
from workflows.messages import (
    BudgetState,
    Failure,
    LoseRollout,
    OpenGroup,
    Purpose,
    RolloutResult,
    RunRollout,
    SealGroup,
)

Request = TypeVar("Request")
Result = TypeVar("Result")


async def start_run(ledger: Ledger, dataset: Path, folder: Path, **sections: Any) -> str:
    """A run of its own for a test; `sections` replace sections of its recipe, and keys of `rollouts`."""
    run_id = f"run-{uuid.uuid4().hex}"
    recipe = Recipe.model_validate(
        {
            "run": {"model": folder / "model", "dataset": dataset},
            "training": {"output_dir": folder / "training"},
        }
        | sections
        | {"rollouts": {"rollout_timeout_s": 60.0} | sections.get("rollouts", {})}
    )
    scanned = scan(dataset)
    await ledger.runs.create(
        run_id, f"queue-{run_id}", recipe.model_dump(mode="json"), scanned.digest, len(scanned), "m" * 64
    )
    return run_id


@dataclasses.dataclass
class World:
    """Everything an activity touches, and shortcuts to it."""

    ledger: Ledger
    run_id: str
    dataset: Path
    folder: Path
    agent: AgentServer
    model: ModelServer
    vllm: FakeVllm

    def __post_init__(self) -> None:
        self.blobs = BlobStore(str(self.folder / "blobs"))
        self.agents = GymAgents({"safe_agent": self.agent.url}, max_connections=8)
        self.server = VllmServer(self.vllm.url, refit_timeout_s=10.0)

    async def use(self, **sections: Any) -> None:
        """Go on with a run whose recipe has these keys."""
        self.run_id = await start_run(self.ledger, self.dataset, self.folder, **sections)

    async def lease(self) -> TrainerLease:
        """The right to write for the run's trainer."""
        return await self.ledger.trainer_leases.acquire(self.run_id, "trainer", 600)

    async def close(self) -> None:
        """Close the clients."""
        await self.agents.close()
        await self.server.close()

    @property
    def rollouts(self) -> RolloutActivities:
        """The activities of a rollout worker that has just started."""
        return RolloutActivities(self.ledger, self.blobs, RunContexts(self.ledger), self.agents, (self.server,))

    @property
    def writing(self) -> LedgerActivities:
        """The ledger activities of a worker that has just started."""
        return LedgerActivities(self.ledger, self.blobs, RunContexts(self.ledger))

    @property
    def groups(self) -> GroupActivities:
        """The activities of groups."""
        return GroupActivities(self.ledger)

    @property
    def operating(self) -> OperatorActivities:
        """The activities behind an operator's requests."""
        return OperatorActivities(self.ledger)

    def open_request(
        self, slot: int = 0, num_rollouts: int = 2, purpose: Purpose = "train", step: int = 0
    ) -> OpenGroup:
        """Ask for a group whose prompt is the row of its slot."""
        part = f"step-{step}" if purpose == "train" else f"eval-{step}"
        return OpenGroup(
            run_id=self.run_id,
            group_id=f"{self.run_id}/{part}/group-{slot}",
            step=step,
            slot=slot,
            purpose=purpose,
            prompt_id=f"safe-{slot}",
            row_index=slot,
            num_rollouts=num_rollouts,
        )

    async def open_group(self, slot: int = 0, num_rollouts: int = 2, purpose: Purpose = "train", step: int = 0) -> str:
        """Open a group; returns its id."""
        request = self.open_request(slot, num_rollouts, purpose, step)
        await call(self.groups.open_group, request)
        return request.group_id

    async def seal(self, group_id: str, state: str = "sealed", bucket: str | None = None) -> BudgetState:
        """Seal, park or drop a group; returns the drop counters after it."""
        reason = None if state == "sealed" else f"the reason of {group_id}"
        request = {"run_id": self.run_id, "group_id": group_id, "state": state, "bucket": bucket, "reason": reason}
        return (await call(self.groups.seal_group, SealGroup.model_validate(request))).budgets

    async def lose(self, group_id: str, index: int, state: str = "lost") -> RolloutResult:
        """Give a rollout up."""
        request = {
            "run_id": self.run_id,
            "group_id": group_id,
            "rollout_id": f"{group_id}/rollout-{index}",
            "index": index,
            "state": state,
            "reason": "AgentFailed (agent): HTTP 500",
        }
        return await call(self.groups.lose_rollout, LoseRollout.model_validate(request))

    async def run_group(self, *rewards: float | None, slot: int = 0, step: int = 0) -> str:
        """A sealed group; a rollout is lost where the reward is None."""
        group_id = await self.open_group(slot, len(rewards), step=step)
        for index, reward in enumerate(rewards):
            if reward is None:
                await self.lose(group_id, index)
                continue
            turns = answer(item([1, 2], [3, 4]), item([1, 2, 3, 4, 5], [6]), reward=reward)
            self.agent.reply = self.model.serving(turns)
            await call(self.rollouts.run_rollout, self.rollout(group_id, index))
        await self.seal(group_id)
        return group_id

    async def drop_group(self, bucket: str | None, slot: int = 0, step: int = 0) -> tuple[str, BudgetState]:
        """A group that was dropped, and the drop counters after it."""
        group_id = await self.open_group(slot, 1, step=step)
        await self.lose(group_id, 0)
        return group_id, await self.seal(group_id, "dropped", bucket)

    def rollout(self, group_id: str, index: int = 0, policy_version: int = 0) -> RunRollout:
        """Ask for an attempt at a rollout of an open group."""
        slot = int(group_id.rsplit("-", 1)[1])
        return RunRollout(
            run_id=self.run_id,
            group_id=group_id,
            rollout_id=f"{group_id}/rollout-{index}",
            step=int(group_id.split("/")[1].rsplit("-", 1)[1]),
            slot=slot,
            index=index,
            row_index=slot,
            purpose="validation" if "/eval-" in group_id else "train",
            policy_version=policy_version,
        )

    async def stored(self, request: RunRollout) -> RolloutRecord:
        """A rollout as the ledger has it."""
        group: GroupRecord = await self.ledger.groups.get(request.group_id)
        return group.rollouts[request.index]

    async def attempts(self, request: RunRollout) -> tuple[AttemptRecord, ...]:
        """The attempts at a rollout, as the ledger has them."""
        return (await self.stored(request)).attempts


async def call(function: Callable[[Request], Awaitable[Result]], request: Request, attempt: int = 1) -> Result:
    """Run an activity as a worker does; `attempt` counts Temporal's tries."""
    environment = ActivityEnvironment()
    environment.info = dataclasses.replace(environment.info, attempt=attempt)
    return await environment.run(function, request)


async def failing(
    function: Callable[[Request], Awaitable[Any]], request: Request, attempt: int = 1
) -> tuple[Failure, ApplicationError]:
    """Run an activity that must fail; returns the failure it carries, and the error."""
    with pytest.raises(ApplicationError) as failed:
        await call(function, request, attempt)
    (failure,) = failed.value.details
    assert isinstance(failure, Failure)
    assert failed.value.type == failure.failure_class
    assert failed.value.non_retryable == (failure.final or failure.bucket == "data")
    return failure, failed.value
