"""A restoration brings the newest published version to endpoints that lost it, and never an older one back."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from tests.generation.site import PATIENCE_S, Site
from workers.generation_worker import build
from workers.worker_process import Resources
from workflows.training_messages import Refit, RefitDone, RestorePolicy

pytestmark = pytest.mark.integration


async def test_endpoint_that_was_started_again_gets_the_newest_version_and_the_other_is_not_loaded(site: Site) -> None:
    await site.publish(0)
    await site.publish(1)
    assert (await site.restore()).version == 1
    site.endpoints[1].restart()
    loads = site.endpoints[0].events.count("a update_weights")
    done = await site.restore()
    assert (done.version, done.endpoints) == (1, 2)
    assert [fake.label for fake in site.endpoints] == ["policy-1", "policy-1"]
    assert site.endpoints[0].events.count("a update_weights") == loads
    assert (await site.ledger.summaries.of("run")).policy_version == 1


async def test_restoring_what_is_served_touches_nothing(site: Site) -> None:
    await site.publish(0)
    await site.restore()
    site.endpoints[0].events.clear()
    assert (await site.restore()).version == 0
    assert site.endpoints[0].events == []


async def test_run_without_a_published_version_has_nothing_to_restore(site: Site) -> None:
    with pytest.raises(ApplicationError, match="has not published a policy version yet") as failed:
        await site.restore()
    assert (failed.value.type, failed.value.non_retryable) == ("WeightsMissing", False)


@workflow.defn
class RefitAndRestore:
    """Ask for a refit, and for a restoration while it runs."""

    def __init__(self) -> None:
        self._restore = False

    @workflow.signal
    def restore(self) -> None:
        self._restore = True

    @workflow.run
    async def run(self, request: Refit, queue: str) -> list[RefitDone]:
        options: dict[str, Any] = {
            "result_type": RefitDone,
            "task_queue": f"{queue}-generation",
            "start_to_close_timeout": timedelta(seconds=300),
            "heartbeat_timeout": timedelta(seconds=300),
        }
        refit = asyncio.create_task(workflow.execute_activity("refit", request, **options))
        await workflow.wait_condition(lambda: self._restore)
        restored = await workflow.execute_activity("restore_policy", RestorePolicy(run_id=request.run_id), **options)
        return [await refit, restored]


async def test_restoration_waits_for_a_refit_and_brings_what_was_published_meanwhile(
    site: Site, temporal_address: str
) -> None:
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter)
    queue = site.recipe.temporal.task_queue
    first = await site.publish(0)
    for fake in site.endpoints:
        fake.go_on.clear()
    async with AsyncExitStack() as closing:
        for worker in await build(Resources(client, site.recipe, site.database, closing)):
            await closing.enter_async_context(worker)
        deciding = Worker(
            client, task_queue=queue, workflows=[RefitAndRestore], workflow_runner=UnsandboxedWorkflowRunner()
        )
        await closing.enter_async_context(deciding)
        refit = Refit(run_id="run", weights=first)
        running = await client.start_workflow(RefitAndRestore.run, args=[refit, queue], id=queue, task_queue=queue)
        assert await asyncio.to_thread(site.endpoints[0].loading.wait, PATIENCE_S)
        await running.signal(RefitAndRestore.restore)
        await until_pending(running, "restore_policy")
        await site.publish(1)
        for fake in site.endpoints:
            fake.go_on.set()
        refitted, restored = await running.result()
    assert (refitted.version, restored.version) == (0, 1)
    for fake in site.endpoints:
        assert fake.label == "policy-1"
        loads = [event.split()[1] for event in fake.events if event.startswith(fake.name)]
        changes = [event for event in loads if event in ("start_weight_update", "finish_weight_update")]
        assert changes == ["start_weight_update", "finish_weight_update"] * 2


async def until_pending(running: WorkflowHandle[Any, Any], name: str) -> None:
    """Wait until an activity of the workflow is scheduled."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            described = (await running.describe()).raw_description
            if any(pending.activity_type.name == name for pending in described.pending_activities):
                return
            await asyncio.sleep(0.05)
