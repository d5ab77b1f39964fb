"""`onbelay group replay`: a diagnostic copy of a closed group, and what it may not touch."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from configs.load import override_recipe
from storage.records import GroupRecord
from tests.cli.operating import WHY, Operated
from workers.cli.starting import start_run

pytestmark = pytest.mark.integration


async def publish_weights(run: Operated) -> None:
    """What the trainer does first."""
    lease = await run.session.ledger.trainer_leases.acquire(run.id, "trainer", 600)
    await run.session.ledger.weights.publish(lease, 0, run.weights.path, run.weights.digest)


async def closed_group(run: Operated) -> GroupRecord:
    """A sealed group of a run whose first weights are published."""
    await publish_weights(run)
    handle = await run.start_group()
    await handle.result()
    return await run.group("sealed")


async def test_a_copy_replays_what_is_recorded_and_leaves_the_run_alone(run: Operated) -> None:
    original = await closed_group(run)
    before = await run.session.ledger.summaries.of(run.id)

    told = await run.json("group", "replay", original.group_id, *WHY, "--watch")

    copy = await run.session.ledger.groups.get(told["copy"])
    assert (copy.purpose, copy.copy_of, copy.state) == ("diagnostic", original.group_id, "sealed")
    assert [(one["replayed"], one["generated"]) for one in told["rollouts"]] == [(1, 0)] * 3
    assert [(one["state"], one["reward"]) for one in told["rollouts"]] == [("valid", 0.5)] * 3
    assert await run.session.ledger.groups.get(original.group_id) == original
    assert await run.session.ledger.summaries.of(run.id) == before
    assert await run.audit() == [("replay", "done", "ada")]
    listed = await run.json("group", "list", run.id, "--purpose", "diagnostic")
    assert [group["copy_of"] for group in listed] == [original.group_id]
    assert f"diagnostic copy of {original.group_id}" in await run.ok("group", "show", copy.group_id)


async def test_the_comparison_says_what_ended_otherwise(run: Operated) -> None:
    original = await closed_group(run)
    run.broken = {1}

    told = await run.ok("group", "replay", original.group_id, *WHY, "--watch")

    assert f"{original.group_id}/replay-0" in told
    lost = next(line for line in told.splitlines() if line.startswith("1 "))
    assert lost.split()[:3] == ["1", "lost", "valid"]
    assert "2 of 3 rollouts ended as before" in told


async def test_a_dry_run_copies_nothing(run: Operated) -> None:
    original = await closed_group(run)
    would = await run.ok("group", "replay", original.group_id, *WHY, "--dry-run")
    assert "3 rollouts with 3 attempts would be copied" in would
    assert await run.session.ledger.groups.list(run.id, purpose="diagnostic") == []
    assert await run.audit() == []


async def test_a_group_that_has_not_ended_is_not_replayed(run: Operated) -> None:
    await publish_weights(run)
    run.broken = {0, 1}
    await run.start_group()
    parked = await run.group("parked")
    said = await run.refused("group", "replay", parked.group_id, *WHY)
    assert "is parked, and only a closed group is replayed" in said
    assert f"onbelay group retry {parked.group_id}" in said


async def test_a_replay_waits_for_another_run_on_the_task_queue(run: Operated) -> None:
    original = await closed_group(run)
    await run.ok("run", "stop", run.id, "--now", *WHY)
    await run.closed()
    second = dataclasses.replace(run.session, recipe=override_recipe(run.recipe, [f"run.id={run.id}-2"]))
    await start_run(second, "demo")

    said = await run.refused("group", "replay", original.group_id, *WHY)
    assert "-2 is running on task queue" in said
    assert await run.session.ledger.groups.list(run.id, purpose="diagnostic") == []


async def test_a_group_whose_blobs_are_gone_is_not_replayed(run: Operated, tmp_path: Path) -> None:
    original = await closed_group(run)
    for blob in [file for file in (tmp_path / "blobs").rglob("*") if file.is_file()]:
        await asyncio.to_thread(blob.unlink)

    said = await run.refused("group", "replay", original.group_id, *WHY)
    assert "no blob at" in said
    assert "no blob at" in await run.refused("group", "replay", original.group_id, *WHY, "--dry-run")
    assert await run.audit() == [("replay", "refused", "ada")]
