"""NeMo-Gym's conformance checks of its token capture, in NeMo-Gym's environment, over a real ledger."""

import asyncio
import os

import pytest
from pydantic import SecretStr

from configs.storage import StorageConfig
from storage.migrate import migrate
from workers.environments.paths import child_environment, environment_python

pytestmark = pytest.mark.integration

CHECKS = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
    "begin_call_custody",
]


async def test_every_check_passes(database_dsn: str) -> None:
    await migrate(StorageConfig(dsn=SecretStr(database_dsn)))
    process = await asyncio.create_subprocess_exec(
        environment_python("gym"),
        "-m",
        "workers.gym.conformance",
        env={**os.environ, **child_environment(), "ONBELAY_TEST_DSN": database_dsn},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    print(f"\n{output}", end="")  # noqa: T201 (what `make gym-conformance` shows)
    assert process.returncode == 0
    assert output.splitlines() == [f"passed {name}" for name in CHECKS]
