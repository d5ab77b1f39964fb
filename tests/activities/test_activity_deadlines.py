"""An activity that hangs ends with a class and its ids before Temporal gives it up, and the worker is free again."""

import asyncio
import uuid
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ActivityError
from temporalio.worker import UnsandboxedWorkflowRunner

from workers import activity_deadlines
from workers.worker_process import new_worker
from workflows.failures import failure_of
from workflows.messages import Failure, FindBatch

pytestmark = pytest.mark.integration


@workflow.defn
class OneActivity:
    """Ask for one activity, which has a minute."""

    @workflow.run
    async def run(self, name: str) -> Failure | None:
        try:
            await workflow.execute_activity(
                name,
                FindBatch(run_id="r", step=3),
                start_to_close_timeout=timedelta(seconds=60),
                retry_policy=RetryPolicy(maximum_attempts=1),
            )
        except ActivityError as error:
            return failure_of(error, boundary="agent", run_id="unknown")
        return None


@activity.defn
async def hang(_: FindBatch) -> None:
    """What waits for a file system that is away."""
    await asyncio.Event().wait()


@activity.defn
async def miss_a_timeout(_: FindBatch) -> None:
    """A timeout of the activity's own."""
    raise TimeoutError("two servers did not meet")


@pytest.fixture
async def client(temporal_address: str) -> Client:
    return await Client.connect(temporal_address, data_converter=pydantic_data_converter)


async def outcome(client: Client, name: str) -> Failure | None:
    queue = f"deadlines-{uuid.uuid4().hex}"
    worker = new_worker(
        client,
        queue,
        boundary="trainer",
        workflows=[OneActivity],
        activities=[hang, miss_a_timeout],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with worker:
        return await client.execute_workflow(OneActivity.run, name, id=queue, task_queue=queue)


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(1, 0.9), (50, 45), (3600, 3595)])
def test_activity_leaves_time_to_say_that_it_was_too_slow(timeout_s: float, limit_s: float) -> None:
    assert activity_deadlines._limit_s(timedelta(seconds=timeout_s)) == pytest.approx(limit_s)


async def test_activity_that_hangs_ends_before_temporal_gives_it_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_deadlines, "_REPORT_S", 59.5)
    monkeypatch.setattr(activity_deadlines, "_REPORT_SHARE", 1.0)
    failure = await outcome(client, "hang")
    assert failure is not None
    assert (failure.failure_class, failure.boundary, failure.bucket) == ("DeadlinePassed", "trainer", "infra")
    assert failure.run_id == "r"
    assert failure.cause == "hang was still at work after 0.5 s"


async def test_timeout_of_the_activitys_own_stays_its_own(client: Client) -> None:
    failure = await outcome(client, "miss_a_timeout")
    assert failure is not None
    assert (failure.failure_class, failure.cause) == ("ApplicationError", "TimeoutError: two servers did not meet")
