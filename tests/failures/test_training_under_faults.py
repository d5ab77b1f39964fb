"""Training under faults equals training without: the same batches and the same weights, bit for bit.

The same run twice, each with a ledger and servers of its own: once undisturbed; once with the agent killed, the rollout
worker killed and vLLM started again in the middle of every step. The policy samples with the run's seed.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from storage.summaries import RunSummary
from tests.databases import new_database
from tests.failures.apart import AGENT, Apart, addresses
from tests.failures.faulty_server import FaultyServer, wavering
from tests.failures.gym_process import GymProcess
from tests.failures.policy_server import Episode
from tests.failures.rollouts_apart import RolloutsApart
from tests.failures.whole_runs import PROMPTS, ROLLOUTS, WholeRun, WholeRuns, whole_runs, write_policy
from tests.failures.world import WatchedAgents, World
from workers.stack.temporal import EmbeddedTemporal

pytestmark = pytest.mark.integration

STEPS = 2
RUN = "compared"
SEED = {"sampling_seed": 7}
SERVED = ("policy_model", "environment", "simple")
FAULTS_DEADLINE_S = 300.0


class Victims:
    """The agent's process and the rollout worker's, which can be killed."""

    def __init__(self, gym: GymProcess, urls: dict[str, str], folder: Path) -> None:
        self._gym, self._urls, self._folder = gym, urls, folder
        self._agent, self._worker = self._new_agent(), RolloutsApart(folder)

    async def ready(self) -> None:
        """Wait until both serve."""
        await asyncio.gather(self._agent.ready(), self._worker.ready())

    async def kill_agent(self) -> None:
        """With all its episodes; then start it again."""
        self._agent.kill()
        self._agent = self._new_agent()
        await self._agent.ready()

    async def kill_worker(self) -> None:
        """With all its activities; then start it again."""
        self._worker.kill()
        self._worker = RolloutsApart(self._folder)
        await self._worker.ready()

    def end(self) -> None:
        """Leave nothing running."""
        self._agent.kill()
        self._worker.kill()

    def _new_agent(self) -> Apart:
        return Apart(self._gym, self._urls, "apart", AGENT, self._folder)


@dataclass
class Site:
    """A world of one run; `victims` where there are faults."""

    runs: WholeRuns
    server: FaultyServer
    gym: GymProcess
    victims: Victims | None

    async def ready(self) -> None:
        """Wait until its processes serve."""
        await asyncio.gather(self.gym.start(), *(() if self.victims is None else (self.victims.ready(),)))

    async def start(self) -> WholeRun:
        """The run; with faults the dead are noticed soon, and budgets and back-off are wide enough for all of them."""
        faulty = self.victims is not None
        return await self.runs.start(
            "apart",
            steps=STEPS,
            name=RUN,
            rollouts={**SEED, "heartbeat_timeout_s": 2.0 if faulty else 60.0},
            failure={"backoff_base_s": 0.5, "max_backoff_s": 1.0, "max_infra_attempts_per_prompt": 1000},
            training={"lr": 1e-2},
        )


async def disturb(site: Site) -> None:
    """The faults of every step, each while calls of the step's rollouts are with vLLM."""
    assert site.victims is not None
    for step in range(STEPS):
        for fault in (site.victims.kill_agent, site.victims.kill_worker):
            caught = site.server.catches(step, samples=5)
            await caught.reached()
            await fault()
            caught.release()
        await site.server.catches(step, samples=5).reached()
        site.server.restarts()


@asynccontextmanager
async def site_of(
    folder: Path, dsn: str, template_dsn: str, policy: Path, temporal: EmbeddedTemporal, apart: dict[str, str] | None
) -> AsyncIterator[Site]:
    """Everything but Temporal and the PostgreSQL server is this site's own. `apart`: where its victims serve."""
    folder.mkdir()
    async with AsyncExitStack() as closing:
        own = await closing.enter_async_context(new_database(dsn, template_dsn))
        storage: dict[str, Any] = {"dsn": own, "blobs_url": str(folder / "blobs"), "record_timeout_s": 10.0}
        database = Database(StorageConfig.model_validate(storage))
        closing.push_async_callback(database.close)
        server = FaultyServer(Episode())
        server.start_over()
        server.policy = wavering
        closing.enter_context(server)
        gym = closing.enter_context(GymProcess(folder, server.url, server.url, storage, SERVED, rollouts=SEED))
        client = await Client.connect(temporal.address, data_converter=pydantic_data_converter)
        blobs = BlobStore(storage["blobs_url"])
        world = World(Ledger(database, blobs), blobs, client, server, gym, WatchedAgents({}, 1, {}), folder)
        runs = await closing.enter_async_context(
            whole_runs(
                world,
                storage,
                temporal.address,
                temporal.ui_url,
                folder,
                policy=policy,
                agents={"apart": gym.urls["simple"] if apart is None else apart["apart"]},
                rollouts_apart=apart is not None,
            )
        )
        victims = None if apart is None else Victims(gym, apart, folder)
        if victims is not None:
            closing.callback(victims.end)
        yield Site(runs, server, gym, victims)


@dataclass(frozen=True)
class Outcome:
    """What a run left: digests of its batches by step and of its weights by version, and its accounts."""

    batches: list[str]
    weights: list[str]
    summary: RunSummary
    failures: Counter[str]
    gradients: list[float]


async def outcome_of(run: WholeRun, site: Site) -> Outcome:
    """Once the run has ended."""
    ledger = site.runs.world.ledger
    summary = await run.end()
    assert site.server.unseeded == 0
    batches, weights, gradients, failures = [], [], [], Counter[str]()
    for step in range(STEPS):
        batch, applied = await ledger.batches.get(RUN, step), await ledger.steps.get(RUN, step)
        published = await ledger.weights.get(RUN, step + 1)
        assert batch is not None
        assert applied is not None
        assert published is not None
        batches.append(batch.digest)
        weights.append(published.digest)
        gradients.append(applied.metrics["grad_norm"])
    for group in await ledger.groups.list(RUN, purpose="train"):
        for rollout in (await ledger.groups.get(group.group_id)).rollouts:
            failures.update(one.failure_class or one.state for one in rollout.attempts)
    return Outcome(batches, weights, summary, failures, gradients)


async def test_a_run_with_faults_in_every_step_ends_with_the_same_batches_and_weights(
    postgres_dsn: str, template_dsn: str, temporal: EmbeddedTemporal, tmp_path: Path
) -> None:
    policy = write_policy(tmp_path / "policy")
    with addresses() as both:
        apart = {"apart": both["apart"]}
        async with (
            site_of(tmp_path / "calm", postgres_dsn, template_dsn, policy, temporal, None) as calm_site,
            site_of(tmp_path / "rough", postgres_dsn, template_dsn, policy, temporal, apart) as rough_site,
        ):
            await asyncio.gather(calm_site.ready(), rough_site.ready())
            calm = await outcome_of(await calm_site.start(), calm_site)
            run = await rough_site.start()
            async with asyncio.timeout(FAULTS_DEADLINE_S):
                await disturb(rough_site)
            rough = await outcome_of(run, rough_site)

    assert all(gradient > 0 for gradient in calm.gradients)
    rollouts = STEPS * PROMPTS * ROLLOUTS
    assert calm.failures == Counter(settled=rollouts)
    assert rough.failures["AgentUnavailable"] >= STEPS, rough.failures
    assert rough.failures["abandoned"] >= STEPS, rough.failures
    assert rough.failures["PolicyMismatch"] >= STEPS, rough.failures
    assert rough.summary.model_calls.replayed > 0
    assert (rough.batches, rough.weights) == (calm.batches, calm.weights)
    assert rough.gradients == calm.gradients
    assert len(set(calm.weights)) == STEPS
