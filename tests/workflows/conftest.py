"""Three services with workers for all tests, and a fresh run for each test.

Most tests use a test server, at a tenth of the cost of the real service. It loses a cancellation of children now and
then, leaves the children of a terminated workflow running, and neither resets nor lists: tests that do any of this use
the real service, as do those that record histories. Another test server skips time; it believes for ever that an
activity runs whose workflow was cancelled, and waits for it.
"""

import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
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
def run(fakes: Fakes) -> Iterator[FakeRun]:
    """A fresh run. What still hangs after the test ends, so that it keeps no place of a worker."""
    run = fakes.new_run(f"run-{uuid.uuid4().hex[:8]}")
    yield run
    run.let_go()


@asynccontextmanager
async def testing_service(fakes: Fakes) -> AsyncIterator[WorkflowEnvironment]:
    """A test server with workers. Its timers pass at once while its own client waits for a result."""
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
    async with testing_service(fakes) as env:
        yield env.client


@pytest.fixture
async def own_env(fakes: Fakes) -> AsyncIterator[WorkflowEnvironment]:
    """A service of the test's own: one that has seen an activity die no longer passes time by itself."""
    async with testing_service(fakes) as env:
        yield env


@pytest.fixture(scope="session")
async def client(fakes: Fakes) -> AsyncIterator[Client]:
    """A client of a test server that skips no time."""
    async with testing_service(fakes) as env:
        yield await Client.connect(
            env.client.service_client.config.target_host,
            namespace=env.client.namespace,
            data_converter=pydantic_data_converter,
        )


@pytest.fixture(scope="session")
async def real(temporal_address: str, fakes: Fakes) -> AsyncIterator[Client]:
    """A client of a real service, with workers. Nothing they write names this machine."""
    client = await Client.connect(temporal_address, data_converter=pydantic_data_converter, identity="onbelay")
    async with serving(client, QUEUE, fakes):
        yield client
