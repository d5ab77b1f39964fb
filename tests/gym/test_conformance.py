"""NeMo-Gym's conformance checks of its token capture, in NeMo-Gym's environment, over a real ledger."""

import asyncio
from pathlib import Path

import pytest

from tests.gym.forks import Forks

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


async def test_every_check_passes(forks: Forks, migrated_dsn: str, tmp_path: Path) -> None:
    variables = {"ONBELAY_TEST_DSN": migrated_dsn}
    output = await asyncio.to_thread(forks.output, "workers.gym.conformance", folder=tmp_path, variables=variables)
    print(f"\n{output}", end="")  # noqa: T201 (what `make gym-conformance` shows)
    assert output.splitlines() == [f"passed {name}" for name in CHECKS]
