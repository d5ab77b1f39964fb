"""Real servers for tests: one PostgreSQL and one Temporal service for the session, a fresh database for each test."""

import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.migrate import migrate
from tests.databases import new_database
from workers.stack.child import running
from workers.stack.ports import distinct_free_ports, free_port
from workers.stack.postgres import EmbeddedPostgres
from workers.stack.temporal import EmbeddedTemporal

# A busy machine is no failure: examples have no deadline of their own, tests have one.
settings.register_profile("onbelay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("onbelay")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Long tests run once by default."""
    parser.addoption("--power-cuts", type=int, default=1, help="runs that lose every process at a random moment")


@pytest.fixture(scope="session")
async def postgres_dsn() -> AsyncIterator[str]:
    """Address of a PostgreSQL server: $ONBELAY_TEST_DSN, or an embedded one."""
    given = os.environ.get("ONBELAY_TEST_DSN")
    if given:
        yield given
        return
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onbelay-tests-")))
        postgres = EmbeddedPostgres(folder, free_port())
        stack.callback(postgres.delete)
        await stack.enter_async_context(running(postgres.service(), folder / "postgres.log"))
        yield postgres.dsn


@pytest.fixture
async def database_dsn(postgres_dsn: str) -> AsyncIterator[str]:
    """Address of an empty database that is dropped after the test."""
    async with new_database(postgres_dsn) as dsn:
        yield dsn


@pytest.fixture(scope="session")
async def template_dsn(postgres_dsn: str) -> AsyncIterator[str]:
    """Address of a migrated database that nobody writes to: a copy takes a tenth of the time of a migration."""
    async with new_database(postgres_dsn) as dsn:
        await migrate(StorageConfig(dsn=SecretStr(dsn)))
        yield dsn


@pytest.fixture
async def migrated_dsn(postgres_dsn: str, template_dsn: str) -> AsyncIterator[str]:
    """Address of a ledger without rows that is dropped after the test."""
    async with new_database(postgres_dsn, template_dsn) as dsn:
        yield dsn


@pytest.fixture(scope="session")
async def temporal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedTemporal]:
    """An in-memory Temporal service with Onbelay's search attributes and its UI, namespace `default`."""
    port, ui_port = distinct_free_ports(2)
    service = EmbeddedTemporal(port, ui_port, "default", timedelta(days=1), database=None)
    async with running(service.service(), tmp_path_factory.mktemp("temporal") / "temporal.log"):
        yield service


@pytest.fixture(scope="session")
def temporal_address(temporal: EmbeddedTemporal) -> str:
    """host:port of the Temporal service."""
    return temporal.address
