"""The embedded Temporal service."""

import asyncio
import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.common import SearchAttributePair, TypedSearchAttributes

from tests.stack.children import until
from workers.stack.ports import distinct_free_ports
from workers.stack.restarts import RestartPolicy
from workers.stack.search_attributes import missing_search_attributes, register_search_attributes
from workers.stack.supervisor import Supervisor
from workers.stack.temporal import EmbeddedTemporal
from workflows.search_attributes import FAILURE_CLASS, RUN_ID, TRAIN_STEP, VALID_ROLLOUTS

pytestmark = pytest.mark.integration


async def test_a_killed_service_comes_back_with_its_workflows_attributes_and_retention(tmp_path: Path) -> None:
    port, ui_port = distinct_free_ports(2)
    temporal = EmbeddedTemporal(port, ui_port, "default", timedelta(days=90), tmp_path / "temporal.db")
    policy = RestartPolicy(first_wait_s=0.1, longest_wait_s=0.5)
    supervisor = Supervisor([temporal.service()], tmp_path / "logs", policy=policy)
    try:
        await supervisor.start()
        client = await Client.connect(temporal.address)
        await client.start_workflow(
            "Anything",
            id="kept",
            task_queue="nobody",
            search_attributes=TypedSearchAttributes(
                [
                    SearchAttributePair(RUN_ID, "run"),
                    SearchAttributePair(TRAIN_STEP, 3),
                    SearchAttributePair(FAILURE_CLASS, ["GymHTTP5xx"]),
                    SearchAttributePair(VALID_ROLLOUTS, 2.0),
                ]
            ),
        )
        query = 'TrainingRunId = "run" AND TrainStep = 3 AND FailureClass = "GymHTTP5xx" AND ValidRollouts > 1'
        async with asyncio.timeout(60):
            while not [found async for found in client.list_workflows(query)]:  # it is written a little later
                await asyncio.sleep(0.05)
        (first,) = supervisor.pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.statuses[0].state == "ready" and supervisor.pids != {first}, 60)
        client = await Client.connect(temporal.address)
        assert [found.id async for found in client.list_workflows(query)] == ["kept"]
        assert (await client.get_workflow_handle("kept").describe()).status == WorkflowExecutionStatus.RUNNING
        described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
        assert described.config.workflow_execution_retention_ttl.ToTimedelta() == timedelta(days=90)
    finally:
        await supervisor.stop()


async def test_registering_search_attributes_again_changes_nothing(temporal_address: str) -> None:
    client = await Client.connect(temporal_address)
    assert await missing_search_attributes(client) == []
    await register_search_attributes(client)
    assert await missing_search_attributes(client) == []
