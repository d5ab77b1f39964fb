"""A worker that stops hands its rollouts over: another one goes on from what is recorded, and no budget is touched."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from configs.recipe import Recipe
from storage.errors import LedgerUnavailable
from storage.records import AttemptRecord
from tests.activities.world import World
from tests.generation.worker_processes import worker_process
from tests.rollouts.agent_server import silence
from tests.rollouts.building import answer, item
from workers.worker_process import GRACE_S, new_worker
from workflows.messages import GroupInput, GroupResult, RunPolicy, WeightsRef
from workflows.prompt_group import PromptGroup

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
THREE_TURNS = answer(item([1], [2]), item([1, 2, 3], [4]), item([1, 2, 3, 4, 5], [6]))


class Site:
    """Workers of a task queue of its own, and the group that they work for."""

    def __init__(self, world: World, client: Client) -> None:
        self.world = world
        self.client = client
        self.queue = f"queue-{world.run_id}"

    def worker(self, grace_s: float = 0.1) -> Worker:
        """A rollout worker that has just started."""
        running = self.world.rollouts
        return new_worker(
            self.client,
            f"{self.queue}-rollouts",
            boundary="agent",
            grace_s=grace_s,
            activities=[running.run_rollout],
        )

    @asynccontextmanager
    async def deciding(self) -> AsyncIterator[None]:
        """The worker of the default queue."""
        groups = self.world.groups
        worker = new_worker(
            self.client,
            self.queue,
            workflows=[PromptGroup],
            activities=[groups.open_group, groups.lose_rollout, groups.seal_group],
            workflow_runner=UnsandboxedWorkflowRunner(),
        )
        async with worker:
            yield

    async def group(self) -> tuple[GroupInput, str]:
        """A group of one rollout that may fail once at most, and its id."""
        stored = (await self.world.ledger.runs.get(self.world.run_id)).recipe
        sections = {name: stored[name] for name in ("grpo", "rollouts", "failure", "generation", "training")}
        sections["failure"] = {"max_infra_attempts_per_prompt": 1, "max_data_attempts_per_prompt": 1}
        policy = RunPolicy.model_validate(sections)
        asked = self.world.open_request(num_rollouts=1)
        group = GroupInput(
            **asked.model_dump(include={"run_id", "step", "slot", "purpose", "prompt_id", "row_index", "num_rollouts"}),
            min_valid_rollouts=1,
            weights=WeightsRef(version=0, path="/weights", digest="d" * 64),
            policy=policy,
            task_queue=self.queue,
        )
        return group, asked.group_id

    async def attempts(self, group_id: str) -> tuple[AttemptRecord, ...]:
        """The attempts at its rollout."""
        return await self.world.attempts(self.world.rollout(group_id))


@pytest.fixture
async def site(world: World, temporal_address: str) -> Site:
    return Site(world, await Client.connect(temporal_address, data_converter=pydantic_data_converter))


async def start(site: Site, group: GroupInput, group_id: str) -> Any:
    return await site.client.start_workflow(PromptGroup.run, group, id=group_id, task_queue=site.queue)


async def test_rollout_of_a_stopping_worker_is_finished_by_another_and_costs_no_budget(site: Site) -> None:
    world = site.world
    group, group_id = await site.group()
    world.agent.reply = world.model.serving(THREE_TURNS, then=silence, calls=2)
    async with site.deciding():
        async with site.worker():
            running = await start(site, group, group_id)
            exchange = await world.agent.asked(1)
            await until_recorded(site, 2)
        async with asyncio.timeout(PATIENCE_S):
            await exchange.dropped.wait()
        (handed_over,) = await site.attempts(group_id)
        assert (handed_over.state, handed_over.failure_class, handed_over.bucket) == ("failed", "HandedOver", "infra")
        assert handed_over.cause is not None
        assert "stops" in handed_over.cause
        world.agent.reply = world.model.serving(THREE_TURNS)
        async with site.worker():
            result: GroupResult = await running.result()
    assert (result.state, result.valid, result.lost, result.bucket) == ("sealed", 1, 0, None)
    assert (world.model.generated, world.model.replayed) == (3, 2)
    assert [attempt.state for attempt in await site.attempts(group_id)] == ["failed", "settled"]
    counts = await world.ledger.budgets.of(world.run_id)
    assert (counts.consecutive_drops, counts.skipped_prompts) == (0, 0)


async def test_rollout_that_ends_within_the_grace_period_is_not_handed_over(site: Site) -> None:
    world = site.world
    group, group_id = await site.group()
    answering, asked = asyncio.Event(), asyncio.Event()

    async def wait(exchange: Any) -> None:
        asked.set()
        await answering.wait()
        await exchange.answer(200, THREE_TURNS)

    world.agent.reply = world.model.serving(THREE_TURNS, then=wait)
    async with site.deciding():
        worker = site.worker(grace_s=60.0)
        serving = asyncio.create_task(worker.run())
        running = await start(site, group, group_id)
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
        stopping = asyncio.create_task(worker.shutdown())
        answering.set()
        result: GroupResult = await running.result()
        await asyncio.gather(stopping, serving)
    assert (result.state, result.valid) == ("sealed", 1)
    assert [attempt.state for attempt in await site.attempts(group_id)] == ["settled"]


async def test_hand_over_that_the_ledger_does_not_take_is_none_of_the_ledgers_failures(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> AttemptRecord:
        raise LedgerUnavailable("db", "connection refused")

    world = site.world
    group, group_id = await site.group()
    world.agent.reply = silence
    async with site.deciding():
        with monkeypatch.context() as patch:
            patch.setattr(world.ledger.rollouts, "fail_attempt", away)
            async with site.worker():
                running = await start(site, group, group_id)
                await world.agent.asked(1)
        world.agent.reply = world.model.serving(THREE_TURNS)
        async with site.worker():
            result: GroupResult = await running.result()
    assert (result.state, result.valid) == ("sealed", 1)
    assert [attempt.state for attempt in await site.attempts(group_id)] == ["abandoned", "settled"]


async def test_rollout_that_may_run_once_is_lost_with_its_worker(site: Site) -> None:
    world = site.world
    await world.use(rollouts={"recovery": {"default": "none"}})
    group, group_id = await site.group()
    world.agent.reply = silence
    async with site.deciding():
        async with site.worker():
            running = await start(site, group, group_id)
            await world.agent.asked(1)
        result: GroupResult = await running.result()
    assert (result.state, result.lost) == ("dropped", 1)
    assert [attempt.failure_class for attempt in await site.attempts(group_id)] == ["HandedOver"]
    assert len(world.agent.exchanges) == 1


async def test_attempt_that_its_workflow_cancels_is_no_failure_of_any_class(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("activities.heartbeat._BEATS_PER_TIMEOUT", 300)  # an activity hears of it when it beats
    monkeypatch.setattr("workers.worker_process.HEARTBEAT_THROTTLE_S", 0.1)
    world = site.world
    group, group_id = await site.group()
    world.agent.reply = silence
    async with site.deciding(), site.worker():
        running = await start(site, group, group_id)
        exchange = await world.agent.asked(1)
        await running.cancel()
        with pytest.raises(WorkflowFailureError):
            await running.result()
        async with asyncio.timeout(PATIENCE_S):
            await exchange.dropped.wait()
        (attempt,) = await site.attempts(group_id)
        assert (attempt.state, attempt.failure_class, attempt.bucket) == ("running", None, None)
    stored = await world.ledger.groups.get(group_id)
    assert (stored.state, stored.bucket) == ("dropped", None)
    counts = await world.ledger.budgets.of(world.run_id)
    assert (counts.consecutive_drops, counts.skipped_prompts) == (0, 0)


async def test_terminated_worker_process_hands_over_after_the_grace_period_of_its_recipe(
    site: Site, ledger_dsn: str, temporal_address: str
) -> None:
    world = site.world
    group, group_id = await site.group()
    recipe = Recipe.model_validate(
        {
            "run": {"model": "model", "dataset": world.dataset},
            "rollouts": {"shutdown_grace_s": 0.5},
            "generation": {"endpoints": [world.vllm.url]},
            "storage": {"dsn": ledger_dsn, "blobs_url": str(world.folder / "blobs")},
            "temporal": {"address": temporal_address, "task_queue": site.queue},
            "gym": {"agents": {"safe_agent": world.agent.url}},
        }
    )
    world.agent.reply = world.model.serving(THREE_TURNS, then=silence, calls=2)
    async with worker_process("rollout-worker", world.folder, recipe) as process:
        running = await start(site, group, group_id)
        await until_recorded(site, 2)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(GRACE_S - 1):  # that of other workers
            assert await process.wait() == 0
    assert [attempt.failure_class for attempt in await site.attempts(group_id)] == ["HandedOver"]
    world.agent.reply = world.model.serving(THREE_TURNS)
    async with site.deciding(), site.worker():
        result: GroupResult = await running.result()
    assert (result.state, result.valid) == ("sealed", 1)
    assert (world.model.generated, world.model.replayed) == (3, 2)


async def until_recorded(site: Site, calls: int) -> None:
    """Wait until so many calls are recorded."""
    async with asyncio.timeout(PATIENCE_S):
        while site.world.model.generated < calls:
            await asyncio.sleep(0.01)
