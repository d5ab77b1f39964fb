"""A real service and one whose time can be skipped, with workers for all tests; a fresh run for each test.

The one that skips time believes for ever that an activity runs whose workflow was cancelled, and waits for it: tests
that cancel use the real one.
"""

import shutil
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment

from tests.workflows.building import QUEUE
from tests.workflows.fake_run import FakeRun
from tests.workflows.fakes import Fakes, serving
from workers.stack.search_attributes import SEARCH_ATTRIBUTES


@pytest.fixture(scope="session")
def fakes() -> Fakes:
    """The activities of all runs."""
    return Fakes()


@pytest.fixture
def run(fakes: Fakes) -> FakeRun:
    """A fresh run."""
    return fakes.new_run(f"run-{uuid.uuid4().hex[:8]}")


@asynccontextmanager
async def skipping_service(fakes: Fakes) -> AsyncIterator[WorkflowEnvironment]:
    """A service whose timers pass at once, with workers."""
    name = "temporal-test-server"
    binary = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    assert binary, f"{name} is not installed"
    async with await WorkflowEnvironment.start_time_skipping(
        data_converter=pydantic_data_converter, test_server_existing_path=binary
    ) as env:
        await env.client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=env.client.namespace, search_attributes=SEARCH_ATTRIBUTES)
        )
        async with serving(env.client, QUEUE, fakes):
            yield env


@pytest.fixture(scope="session")
async def skipping(fakes: Fakes) -> AsyncIterator[Client]:
    """A client whose waiting for a result passes the time."""
    async with skipping_service(fakes) as env:
        yield env.client


@pytest.fixture
async def own_env(fakes: Fakes) -> AsyncIterator[WorkflowEnvironment]:
    """A service of the test's own: one that has seen an activity die no longer passes time by itself."""
    async with skipping_service(fakes) as env:
        yield env


@pytest.fixture(scope="session")
async def client(temporal_address: str, fakes: Fakes) -> AsyncIterator[Client]:
    """A client of a real service, with workers. Nothing they write names this machine."""
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter, identity="onbelay")
    async with serving(client, QUEUE, fakes):
        yield client
