"""The watchdog names what is stuck, once, and outlives a ledger that is not there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.recipe import Recipe
from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.ledger import Ledger
from tests.stack.children import until
from tests.storage.building import Story
from workers.watchdog import SHORTEST_PAUSE_S, Watchdog

pytestmark = pytest.mark.integration
RECIPE = Recipe.model_validate(
    {"run": {"model": "m", "dataset": "d"}, "failure": {"stall_timeout_s": 1e-6}}
).model_dump(mode="json")


@pytest.fixture
async def ledger(migrated_dsn: str, tmp_path: Path) -> AsyncIterator[Ledger]:
    config = StorageConfig(dsn=SecretStr(migrated_dsn), blobs_url=str(tmp_path))
    database = Database(config)
    yield Ledger(database, BlobStore(config.blobs_url))
    await database.close()


async def test_a_silent_attempt_is_named_once_until_it_moves(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    await ledger.runs.create("r", "queue", RECIPE, "d" * 64, 1, "m" * 64)
    await ledger.runs.create("elsewhere", "other", RECIPE, "d" * 64, 1, "m" * 64)
    story = Story(ledger, "r")
    rollout_id = await story.open_rollout()
    attempt = await story.begin(rollout_id)
    await Story(ledger, "elsewhere").begin(await Story(ledger, "elsewhere").open_rollout())
    watchdog = Watchdog(ledger, "queue")

    with caplog.at_level(logging.WARNING):
        assert await watchdog.look() == SHORTEST_PAUSE_S
        await watchdog.look()
        (first,) = said(caplog)
        await ledger.calls.claim(rollout_id, attempt, "request")
        await watchdog.look()
        (_, second) = said(caplog)
        await ledger.runs.set_state("r", "stopped")
        await watchdog.look()

    assert first.startswith(f"stuck: group r/step-0/group-0, rollout {rollout_id}, attempt 0 on worker-1, no call in")
    assert "call 0 in flight, silent since 20" in second
    assert len(said(caplog)) == 2


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the watchdog itself has logged."""
    return [record.getMessage() for record in caplog.records if record.name == "workers.watchdog"]


async def test_it_looks_again_when_the_ledger_is_back_and_ends_with_its_process(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.watchdog.SHORTEST_PAUSE_S", 0.01)
    await ledger.runs.create("r", "queue", RECIPE, "d" * 64, 1, "m" * 64)
    story = Story(ledger, "r")
    await story.begin(await story.open_rollout())
    nowhere = Ledger(Database(StorageConfig(dsn=SecretStr("postgresql://a:b@127.0.0.1:1/x"))), BlobStore("/nowhere"))
    working, broken = ledger.runs, nowhere.runs

    with caplog.at_level(logging.INFO, logger="workers.watchdog"):
        async with AsyncExitStack() as closing:
            ledger.runs = broken
            Watchdog(ledger, "queue").start(closing)
            await until(lambda: "waits for the ledger" in caplog.text)
            ledger.runs = working
            await until(lambda: "stuck: group" in caplog.text)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "watchdog"]
