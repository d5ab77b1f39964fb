"""Quarantine from end to end: the generation worker writes it, and the rollout worker samples without the endpoint."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from temporalio.exceptions import ApplicationError

from activities.errors import PolicyMismatch
from activities.generation.vllm import PolicyVersions, servers_of
from activities.rollouts.attempts import Attempts
from activities.rollouts.gym_agent import GymAgents
from configs.recipe import Recipe
from configs.rollouts import RolloutsConfig
from storage.quarantines import QuarantineRecord
from tests.generation.site import PATIENCE_S, Site
from workflows.messages import RunRollout

pytestmark = pytest.mark.integration


@pytest.fixture
def quarantining(site: Site) -> Site:
    """The run goes on without endpoints that fail."""
    site.set(on_failed_endpoint="quarantine")
    return site


async def in_quarantine(site: Site) -> list[QuarantineRecord]:
    return await site.ledger.quarantines.open()


@asynccontextmanager
async def rollout_worker(site: Site) -> AsyncIterator[Attempts]:
    """As far as it asks what the endpoints serve."""
    agents = GymAgents({}, max_connections=1)
    servers = servers_of(site.recipe.generation)
    yield Attempts(site.ledger, agents, servers)
    await agents.close()
    for server in servers:
        await server.close()


async def versions_for(site: Site, version: int) -> PolicyVersions:
    """What a rollout of this policy version finds."""
    rollout = RunRollout(
        run_id="run",
        group_id="run/step-0/group-0",
        rollout_id="run/step-0/group-0/rollout-0",
        step=0,
        slot=0,
        index=0,
        row_index=0,
        purpose="train",
        policy_version=version,
    )
    async with rollout_worker(site) as attempts:
        return await attempts.serving(RolloutsConfig(), rollout)


async def test_waiting_never_leaves_an_endpoint_out_and_the_version_does_not_advance(site: Site) -> None:
    await site.refit(await site.publish(0))
    newer = await site.publish(1)
    site.endpoints[1].fails_updates = True
    for attempt in (1, 2, 20):
        with pytest.raises(ApplicationError, match=r"1 of \d vLLM endpoints did not load"):
            await site.refit(newer, attempt)
    assert await in_quarantine(site) == []
    assert all(fake.paused for fake in site.endpoints)
    assert (await site.ledger.summaries.of("run")).policy_version == 0
    site.endpoints[1].fails_updates = False
    assert (await site.refit(newer, 21)).endpoints == 2


async def test_the_second_failed_try_quarantines_and_rollouts_go_on_without_the_endpoint(quarantining: Site) -> None:
    site = quarantining
    good, bad = site.endpoints
    await site.refit(await site.publish(0))
    newer = await site.publish(1)
    bad.dead = True
    with pytest.raises(ApplicationError, match="1 of 2 vLLM endpoints did not answer"):
        await site.refit(newer, attempt=1)
    assert await in_quarantine(site) == []

    done = await site.refit(newer, attempt=2)
    assert (done.version, done.endpoints, done.quarantined) == (1, 1, (bad.url,))
    (quarantine,) = await in_quarantine(site)
    assert (quarantine.run_id, quarantine.endpoint, quarantine.version) == ("run", bad.url, 1)
    assert "answered POST /collective_rpc with 500" in quarantine.reason
    assert (await site.ledger.summaries.of("run")).policy_version == 1
    versions = await versions_for(site, 1)
    assert (versions.min, versions.max, versions.processes) == (1, 1, (good.process,))


async def test_the_next_refit_takes_the_endpoint_back(quarantining: Site) -> None:
    site = quarantining
    _, bad = site.endpoints
    bad.fails_updates = True
    assert (await site.refit(await site.publish(0), attempt=2)).quarantined == (bad.url,)
    assert (await site.refit(await site.publish(1))).quarantined == (bad.url,), "in quarantine it fails nobody's refit"

    bad.fails_updates = False
    done = await site.refit(await site.publish(2))
    assert (done.endpoints, done.quarantined) == (2, ())
    assert await in_quarantine(site) == []
    (ended,) = await site.ledger.quarantines.of_run("run")
    assert ended.released_at is not None
    assert len((await versions_for(site, 2)).processes) == 2


async def test_a_restoration_takes_the_endpoint_back_as_well(quarantining: Site) -> None:
    site = quarantining
    _, bad = site.endpoints
    bad.dead = True
    await site.refit(await site.publish(0), attempt=2)
    bad.restart()
    done = await site.restore()
    assert (done.version, done.endpoints, done.quarantined) == (0, 2, ())
    assert bad.generate() == "policy-0"


async def test_a_worker_that_was_killed_between_quarantine_and_resumption_is_followed_by_one_that_finishes(
    quarantining: Site,
) -> None:
    site = quarantining
    good, bad = site.endpoints
    weights = await site.publish(0)
    bad.dead = True
    good.go_on.clear()
    killed = asyncio.create_task(site.refit(weights, attempt=2))
    assert await asyncio.to_thread(good.loading.wait, PATIENCE_S)
    killed.cancel()
    await asyncio.wait((killed,))
    good.go_on.set()
    assert good.paused
    assert len(await in_quarantine(site)) == 1

    done = await site.refit(weights, attempt=3)
    assert (done.endpoints, done.quarantined) == (1, (bad.url,))
    assert not good.paused
    assert len(await site.ledger.quarantines.of_run("run")) == 1


async def test_going_back_to_waiting_needs_the_endpoint_again_and_releases_it(quarantining: Site) -> None:
    site = quarantining
    _, bad = site.endpoints
    bad.dead = True
    weights = await site.publish(0)
    await site.refit(weights, attempt=2)
    site.set(on_failed_endpoint="wait")
    with pytest.raises(ApplicationError, match="1 of 2 vLLM endpoints did not answer"):
        await site.refit(weights, attempt=2)
    bad.restart()
    await site.refit(weights, attempt=3)
    assert await in_quarantine(site) == []


async def test_with_no_endpoint_left_nobody_is_quarantined(quarantining: Site) -> None:
    site = quarantining
    for fake in site.endpoints:
        fake.dead = True
    with pytest.raises(ApplicationError, match="2 of 2 vLLM endpoints did not answer") as failed:
        await site.refit(await site.publish(0), attempt=5)
    assert not failed.value.non_retryable
    assert await in_quarantine(site) == []


async def test_rollouts_have_the_policy_restored_when_one_of_several_endpoints_dies(site: Site) -> None:
    await site.refit(await site.publish(0))
    site.endpoints[1].dead = True
    with pytest.raises(PolicyMismatch, match="one of 2 vLLM endpoints may have to be quarantined"):
        await versions_for(site, 0)


async def test_rollouts_wait_while_every_endpoint_is_in_quarantine(site: Site) -> None:
    await site.refit(await site.publish(0))
    for fake in site.endpoints:
        await site.ledger.quarantines.begin("run", fake.url, 0, "of an earlier run")
    with pytest.raises(PolicyMismatch, match="all vLLM endpoints are in quarantine"):
        await versions_for(site, 0)


def test_a_run_that_cannot_route_around_an_endpoint_may_not_quarantine() -> None:
    with pytest.raises(ValueError, match=r"generation\.on_failed_endpoint.*rollouts\.evidence"):
        Recipe.model_validate(
            {
                "run": {"model": "model", "dataset": "rows.jsonl"},
                "generation": {"on_failed_endpoint": "quarantine"},
                "rollouts": {"evidence": "response"},
            }
        )
