"""Prompt groups on real servers: what a test arranges, and what the ledger says afterwards."""

import asyncio
import dataclasses
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle
from temporalio.testing import ActivityEnvironment

from activities.errors import BoundaryError
from activities.generation.vllm import VllmServer
from activities.rollout_activities import RolloutActivities
from activities.rollouts.dataset import scan
from activities.rollouts.gym_agent import GymAgents
from activities.run_context import RunContexts
from activities.training.batch import TrainingBatch, TrainingRow
from configs.recipe import Recipe
from storage.blobs import BlobStore
from storage.capture_ids import capture_id
from storage.ledger import Ledger
from storage.records import AttemptCall, AttemptRecord, GroupRecord, RolloutRecord, SettledRollout
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import Episode, PolicyServer
from workflows.messages import GroupInput, GroupResult, RolloutResult, RunPolicy, RunRollout, WeightsRef
from workflows.prompt_group import PromptGroup
from workflows.search_attributes import GROUP_STATE

QUEUE = "failures"
DEADLINE_S = 180.0
TOOL = {
    "type": "function",
    "name": "use",
    "description": "Use it.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "additionalProperties": False},
}
LETTERS = {"generated": "g", "replayed": "r", "failed": "f", "measured": "m", "reported": "p"}


class WatchedAgents(GymAgents):
    """Remembers what `/run` answered: an HTTP status, or the class of the error where there was none."""

    def __init__(self, urls: dict[str, str], max_connections: int, environments: dict[str, str]) -> None:
        super().__init__(urls, max_connections, environments)
        self._answered: dict[tuple[str, int], str] = {}
        self._deadlines: set[asyncio.Timeout] = set()

    def meet(self, name: str, url: str) -> None:
        """Another agent, which a test started."""
        self._urls[name] = url

    async def hurry(self, left_s: float) -> None:
        """Wait until a `/run` waits for its answer, and give all that do so long from now on. How long agents take to
        come to what a test looks at is then no matter."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._deadlines:
                await asyncio.sleep(0.02)
        for deadline in self._deadlines:
            deadline.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _post(self, url: str, body: dict[str, Any], max_bytes: int) -> tuple[int, bytes]:
        async with asyncio.timeout(None) as deadline:
            self._deadlines.add(deadline)
            try:
                return await super()._post(url, body, max_bytes)
            finally:
                self._deadlines.discard(deadline)

    async def run(self, agent: str, body: dict[str, Any], *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        """As GymAgents."""
        episode = body.get("episode_id") or {"rollout_id": body["_ng_rollout_id"], "attempt": body["_ng_attempt_index"]}
        key = episode["rollout_id"], episode["attempt"]
        try:
            answer = await super().run(agent, body, timeout_s=timeout_s, max_bytes=max_bytes)
        except BoundaryError as error:
            status = re.search(r"HTTP (\d+)", str(error))
            self._answered[key] = status[1] if status else type(error).__name__
            raise
        self._answered[key] = "200"
        return answer

    def statuses(self, rollout: RolloutRecord) -> tuple[str, ...]:
        """One for each attempt that came to ask."""
        keys = [(capture_id(rollout.rollout_id), attempt.attempt) for attempt in rollout.attempts]
        return tuple(self._answered[key] for key in keys if key in self._answered)


def ends(rollout: RolloutRecord) -> list[str]:
    """How each attempt ended: its failure class and bucket, else its state."""
    return [f"{one.failure_class} {one.bucket}" if one.failure_class else one.state for one in rollout.attempts]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A rollout as the ledger has it. `statuses`: what `/run` answered each attempt, as the worker saw it."""

    record: RolloutRecord
    settled: SettledRollout
    events: tuple[tuple[AttemptCall, ...], ...]
    statuses: tuple[str, ...]

    @property
    def calls(self) -> tuple[str, ...]:
        """For each attempt the letters of its calls, in order."""
        return tuple("".join(LETTERS[event.outcome] for event in events) for events in self.events)

    @property
    def attempts(self) -> tuple[AttemptRecord, ...]:
        """Oldest first."""
        return self.record.attempts

    @property
    def ends(self) -> list[str]:
        """How each attempt ended."""
        return ends(self.record)

    def sampled(self, attempt: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Tokens and log-probabilities of the responses of an attempt, generated or replayed."""
        return [
            (event.sampled_token_ids, event.log_probs)
            for event in self.events[attempt]
            if event.outcome in ("generated", "replayed")
        ]


@dataclasses.dataclass(frozen=True)
class Ended:
    """A group that has ended. `broken`: rollouts that were not valid at once; `sound`: the others."""

    result: GroupResult
    group: GroupRecord
    rollouts: tuple[Seen, ...]

    @property
    def counts(self) -> tuple[str, int, int, int]:
        """State of the group, then its valid, masked and lost rollouts."""
        return self.result.state, self.result.valid, self.result.masked, self.result.lost

    @property
    def broken(self) -> list[Seen]:
        return [one for one in self.rollouts if one not in self.sound]

    @property
    def sound(self) -> list[Seen]:
        return [one for one in self.rollouts if one.record.state == "valid" and len(one.attempts) == 1]


@dataclasses.dataclass
class World:
    """The servers and their ledger."""

    ledger: Ledger
    blobs: BlobStore
    client: Client
    vllm: PolicyServer
    gym: GymProcess
    agents: WatchedAgents
    folder: Path

    @property
    def episode(self) -> Episode:
        """What the policy does."""
        return self.vllm.episode

    async def new_run(self, agent: str, row: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Recipe:
        """A run with one row for an agent; `sections` change those of its recipe. Its id is `recipe.run.id`."""
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        self.episode.marker = run_id
        dataset = self.folder / f"{run_id}.jsonl"
        params = {"input": [{"role": "user", "content": f"Use the tool for {run_id}."}], "tools": [TOOL]}
        reference = {"type": "responses_api_agents", "name": agent}
        dataset.write_text(json.dumps({"responses_create_params": params, "agent_ref": reference} | (row or {})) + "\n")
        changed = {
            "run": {"id": run_id, "model": self.folder, "dataset": dataset},
            "rollouts": {"rollout_timeout_s": 60.0, "heartbeat_timeout_s": 30.0},
            "failure": {"backoff_base_s": 0.05, "max_backoff_s": 0.1},
            "training": {"output_dir": self.folder / "training", "max_row_tokens": 16_384},
        }
        for name, section in sections.items():
            changed[name] = changed.get(name, {}) | section
        recipe = Recipe.model_validate(changed)
        rows = scan(dataset)
        await self.ledger.runs.create(
            run_id, QUEUE + run_id, recipe.model_dump(mode="json"), rows.digest, len(rows), "m" * 64
        )
        return recipe

    async def start_group(self, recipe: Recipe, size: int = 2) -> "RunningGroup":
        """Start the PromptGroup of a run's only row. One valid rollout is enough to keep it."""
        run_id = recipe.run.id
        assert run_id is not None
        group_id = f"{run_id}/step-0/group-0"
        group = GroupInput(
            run_id=run_id,
            step=0,
            slot=0,
            purpose="train",
            prompt_id="row-000000",
            row_index=0,
            num_rollouts=size,
            min_valid_rollouts=1,
            weights=WeightsRef(version=0, path=str(self.folder), digest="d" * 64),
            policy=RunPolicy.model_validate(
                {name: getattr(recipe, name) for name in ("grpo", "rollouts", "failure", "generation", "training")}
            ),
            task_queue=QUEUE,
        )
        handle = await self.client.start_workflow(PromptGroup.run, group, id=group_id, task_queue=QUEUE)
        return RunningGroup(self, run_id, group_id, handle)

    async def run_group(self, agent: str = "simple", *, size: int = 2, **sections: dict[str, Any]) -> Ended:
        """Run a group of so many rollouts to its end."""
        return await (await self.start_group(await self.new_run(agent, **sections), size)).end()

    @asynccontextmanager
    async def verifying(self, agent: str, row: dict[str, Any] | None = None) -> AsyncIterator["RunningGroup"]:
        """A group of one rollout, whose agent waits for its reward while the block runs."""
        await self.gym.verifier("hold")
        try:
            group = await self.start_group(await self.new_run(agent, row), 1)
            await self.gym.until_verifying()
            yield group
        finally:
            await self.gym.verifier("open")

    async def seen(self, group_id: str) -> tuple[GroupRecord, tuple[Seen, ...]]:
        """A group and its rollouts as the ledger has them."""
        group = await self.ledger.groups.get(group_id)
        settled = {one.rollout_id: one for one in await self.ledger.rollouts.settled([group_id])}
        rollouts = [
            Seen(
                rollout,
                settled[rollout.rollout_id],
                tuple(
                    [
                        tuple(await self.ledger.calls.of_attempt(rollout.rollout_id, one.attempt))
                        for one in rollout.attempts
                    ]
                ),
                self.agents.statuses(rollout),
            )
            for rollout in group.rollouts
        ]
        return group, tuple(rollouts)

    async def rows(self, rollout: RolloutRecord) -> tuple[TrainingRow, ...]:
        """What a valid rollout trains."""
        assert rollout.evidence_digest is not None
        return TrainingBatch.from_bytes(await self.blobs.get(rollout.evidence_digest)).rows

    async def attempt(self, request: RunRollout, gym: GymProcess | None = None) -> RolloutResult:
        """One attempt, by a worker of its own, through the agents of a Gym process."""
        agents = GymAgents((gym or self.gym).urls, max_connections=4)
        async with VllmServer(self.vllm.url, refit_timeout_s=10.0) as server:
            worker = RolloutActivities(self.ledger, self.blobs, RunContexts(self.ledger), agents, (server,))
            try:
                return await ActivityEnvironment().run(worker.run_rollout, request)
            finally:
                await agents.close()

    async def open_rollout(self, recipe: Recipe) -> RunRollout:
        """Open the group of a run with one rollout; returns the request for an attempt at it."""
        run_id = recipe.run.id
        assert run_id is not None
        group_id = f"{run_id}/step-0/group-0"
        await self.ledger.groups.open(group_id, run_id, 0, 0, "train", "row-000000", 0, 1)
        return RunRollout(
            run_id=run_id,
            group_id=group_id,
            rollout_id=f"{group_id}/rollout-0",
            step=0,
            slot=0,
            index=0,
            row_index=0,
            purpose="train",
            policy_version=0,
        )


async def until_parked(client: Client, group_id: str) -> None:
    """Wait until a group takes an operator's decision. The ledger has it as parked a moment before."""
    handle = client.get_workflow_handle(group_id)
    async with asyncio.timeout(DEADLINE_S):
        while (await handle.describe()).typed_search_attributes.get(GROUP_STATE) != "parked":
            await asyncio.sleep(0.02)


@dataclasses.dataclass
class RunningGroup:
    """A PromptGroup workflow."""

    world: World
    run_id: str
    id: str
    handle: WorkflowHandle[PromptGroup, GroupResult]

    async def say(self, text: str, expect: int = 200) -> None:
        """A model call of rollout 0 beside those that its agent makes."""
        answer = await self.world.gym.call_model(f"{self.id}/rollout-0", f"{text} for {self.run_id}.")
        assert answer.status_code == expect, answer.text

    async def rollouts(self) -> Sequence[RolloutRecord]:
        """As the ledger has them."""
        return (await self.world.ledger.groups.get(self.id)).rollouts

    async def until(self, holds: Callable[[Sequence[RolloutRecord]], bool]) -> None:
        """Wait until the ledger says so of the rollouts."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(await self.rollouts()):
                await asyncio.sleep(0.02)

    async def until_calls(self, calls: int) -> None:
        """Wait until so many calls of the first attempt of every rollout are recorded."""
        recorded = self.world.ledger.calls.of_attempt
        async with asyncio.timeout(DEADLINE_S):
            for rollout in await self.rollouts():
                while len(await recorded(rollout.rollout_id, 0)) < calls:
                    await asyncio.sleep(0.02)

    async def until_given_back(self) -> None:
        """Wait until NeMo-Gym has cancelled an agent that nobody waits for: its model call is given back."""
        attempts = [attempt for rollout in await self.rollouts() for attempt in rollout.attempts]
        async with asyncio.timeout(DEADLINE_S):
            while not any([await self._gave_back(attempt) for attempt in attempts]):
                await asyncio.sleep(0.02)

    async def _gave_back(self, attempt: AttemptRecord) -> bool:
        leases = await self.world.ledger.calls.leases(attempt.rollout_id, attempt.attempt)
        return any(lease.released_at is not None for lease in leases)

    async def until_parked(self) -> None:
        """Wait until the group takes an operator's decision."""
        await until_parked(self.world.client, self.id)

    async def end(self) -> Ended:
        """Wait for the end. Whatever happened, the ledger breaks none of its invariants."""
        async with asyncio.timeout(DEADLINE_S):
            result = await self.handle.result()
        assert await self.world.ledger.checks.of(self.run_id) == []
        return Ended(result, *await self.world.seen(self.id))
