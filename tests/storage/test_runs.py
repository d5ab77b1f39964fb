"""Runs: unique names, one live run per task queue."""

import asyncio
import uuid

import pytest

from storage.errors import QueueBusy, RunExists, UnknownRun
from storage.ledger import Ledger
from storage.records import RunRecord, RunState
from tests.storage.building import Story, action, start_run

pytestmark = pytest.mark.integration


async def create(ledger: Ledger, run_id: str, task_queue: str) -> RunRecord:
    return await ledger.runs.create(run_id, task_queue, {"a": [1, None, "x"]}, "d", 7, "m")


async def test_run_is_read_back_as_it_was_created(ledger: Ledger) -> None:
    name = uuid.uuid4().hex
    created = await create(ledger, name, name)

    assert created == await ledger.runs.get(name)
    assert (created.state, created.recipe, created.dataset_rows) == ("running", {"a": [1, None, "x"]}, 7)
    assert created in await ledger.runs.list()


async def test_run_id_that_exists_is_refused_and_the_first_run_stands(ledger: Ledger) -> None:
    first = await start_run(ledger)

    with pytest.raises(RunExists, match=first.run_id):
        await create(ledger, first.run_id, "another-queue")
    assert await ledger.runs.get(first.run_id) == first


async def test_task_queue_of_a_live_run_is_busy_and_the_error_names_that_run(ledger: Ledger) -> None:
    live = await start_run(ledger)

    with pytest.raises(QueueBusy, match=live.run_id):
        await create(ledger, uuid.uuid4().hex, live.task_queue)


@pytest.mark.parametrize("state", ["completed", "stopped", "failed", "terminated"])
async def test_task_queue_of_an_ended_run_is_free(ledger: Ledger, state: RunState) -> None:
    ended = await start_run(ledger)
    await ledger.runs.set_state(ended.run_id, state, "it ended")

    assert (await create(ledger, uuid.uuid4().hex, ended.task_queue)).state == "running"


async def test_only_one_of_two_runs_started_at_once_gets_the_queue(ledger: Ledger) -> None:
    queue = uuid.uuid4().hex

    results = await asyncio.gather(
        *(create(ledger, f"{queue}-{number}", queue) for number in range(2)), return_exceptions=True
    )

    assert sorted(type(result).__name__ for result in results) == ["QueueBusy", "RunRecord"]


async def test_run_resumes_only_when_its_queue_is_free(ledger: Ledger) -> None:
    ended = await start_run(ledger)
    await ledger.runs.set_state(ended.run_id, "failed", "gym is gone")
    live = await create(ledger, uuid.uuid4().hex, ended.task_queue)

    with pytest.raises(QueueBusy, match=live.run_id):
        await ledger.runs.set_state(ended.run_id, "running")
    assert (await ledger.runs.get(ended.run_id)).reason == "gym is gone"

    await ledger.runs.set_state(live.run_id, "completed")
    assert (await ledger.runs.set_state(ended.run_id, "running")).state == "running"


async def test_changed_recipe_counts_from_then_on(ledger: Ledger) -> None:
    run = await start_run(ledger)

    changed = await ledger.runs.change_recipe(run.run_id, {"failure": {"max_skipped_prompts": 3}})

    assert changed.recipe == {"failure": {"max_skipped_prompts": 3}}
    assert await ledger.runs.get(run.run_id) == changed
    with pytest.raises(UnknownRun, match="nobody"):
        await ledger.runs.change_recipe("nobody", {})


async def test_unknown_run_is_named(ledger: Ledger) -> None:
    with pytest.raises(UnknownRun, match="nobody"):
        await ledger.runs.get("nobody")
    with pytest.raises(UnknownRun, match="nobody"):
        await ledger.runs.set_state("nobody", "failed")


async def test_every_part_names_a_run_that_is_not_there(ledger: Ledger) -> None:
    nobody = Story(ledger, "nobody")
    for write in (
        nobody.group(),
        nobody.batch([]),
        ledger.prompts.claim("nobody", 0, "train", 0, 1, lambda position: (position, "p")),
        ledger.steps.record_metrics("nobody", 0, {"loss": 1.0}),
        ledger.trainer_leases.acquire("nobody", "trainer", 60),
        ledger.evaluations.record("nobody", 0, 0.5, 4),
        ledger.summaries.of("nobody"),
        ledger.budgets.of("nobody"),
        ledger.actions.record(action("nobody")),
    ):
        with pytest.raises(UnknownRun, match="nobody"):
            await write
