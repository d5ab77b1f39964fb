"""Stopping workers ends: activities have their grace period, are cancelled, and are not waited for any longer."""

import asyncio
import uuid
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import UnsandboxedWorkflowRunner

from workers import worker_process
from workers.worker_process import new_worker, stop_all

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0


@workflow.defn
class OneStubborn:
    """Ask for one activity."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(
            "stubborn", start_to_close_timeout=timedelta(seconds=60), retry_policy=RetryPolicy(maximum_attempts=1)
        )


class Stubborn:
    """An activity that does not end when it is cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()
        self.told = asyncio.Event()
        self.cancelled = 0

    @activity.defn
    async def stubborn(self) -> None:
        self.begun.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                self.told.set()


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_activity_that_does_not_even_end_when_cancelled_does_not_hold_the_process(
    temporal_address: str, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_TIMEOUT_S", 0.3)
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter)
    queue, one = f"stopping-{uuid.uuid4().hex}", Stubborn()
    worker = new_worker(
        client,
        queue,
        grace_s=grace_s,
        workflows=[OneStubborn],
        activities=[one.stubborn],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    serving = asyncio.create_task(worker.run())
    running = await client.start_workflow(OneStubborn.run, id=queue, task_queue=queue)
    async with asyncio.timeout(PATIENCE_S):
        await one.begun.wait()
    with pytest.raises(TimeoutError):
        await stop_all("worker", [worker])
    async with asyncio.timeout(PATIENCE_S):
        await one.told.wait()
    assert one.cancelled == 1
    one.let_go.set()
    await serving
    await running.terminate()
