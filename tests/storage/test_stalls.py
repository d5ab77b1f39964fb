"""Stalls: running attempts of open groups that were silent for too long, with the call that they wait for."""

import pytest
from sqlalchemy import text

from storage.database import Database
from storage.records import Stall
from tests.storage.building import Story

pytestmark = pytest.mark.integration

SILENT_S = 3600.0
AGE = {
    "attempts": "UPDATE attempts SET started_at = started_at - interval '2 hours' WHERE rollout_id = :id",
    "leases": "UPDATE model_call_leases SET claimed_at = claimed_at - interval '2 hours', "
    "released_at = released_at - interval '2 hours' WHERE rollout_id = :id",
    "calls": "UPDATE model_calls SET ended_at = ended_at - interval '2 hours' WHERE rollout_id = :id",
}


async def age(owner: Database, rollout_id: str, *tables: str) -> None:
    """Let what happened to a rollout have happened two hours ago."""
    async with owner.transaction() as session:
        await session.execute(text("SET LOCAL session_replication_role = replica"))
        for table in tables or AGE:
            await session.execute(text(AGE[table]), {"id": rollout_id})


async def stalls(story: Story) -> list[Stall]:
    return await story.ledger.stalls.of(story.run_id, SILENT_S)


async def test_attempt_that_began_and_was_silent_since_is_named(story: Story, owner: Database) -> None:
    rollout_id = await story.open_rollout()
    await story.fail(rollout_id)
    await story.begin(rollout_id)
    assert await stalls(story) == []

    await age(owner, rollout_id)

    group = await story.ledger.groups.get(story.group_id(0, 0))
    assert await stalls(story) == [
        Stall(
            group_id=group.group_id,
            rollout_id=rollout_id,
            attempt=1,
            worker="worker-1",
            call=None,
            since=group.rollouts[0].attempts[1].started_at,
        )
    ]


async def test_call_in_flight_is_named(story: Story, owner: Database) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0, fingerprint="first")
    await story.ledger.calls.release(await story.ledger.calls.claim(rollout_id, 0, "gone"))
    await story.ledger.calls.claim(rollout_id, 0, "hanging")
    await age(owner, rollout_id)

    assert [(stall.attempt, stall.call) for stall in await stalls(story)] == [(0, 2)]


@pytest.mark.parametrize("heard", ["attempts", "leases", "calls"])
async def test_attempt_is_heard_of_when_it_begins_claims_or_records(story: Story, owner: Database, heard: str) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0)

    await age(owner, rollout_id, *(table for table in AGE if table != heard))
    assert await stalls(story) == []
    await age(owner, rollout_id, heard)
    assert len(await stalls(story)) == 1


async def test_what_ended_or_waits_for_an_operator_is_not_stuck(story: Story, owner: Database) -> None:
    ended, parked, settled = [await story.group(slot=slot, num_rollouts=1) for slot in range(3)]
    for group in (ended, parked, settled):
        await story.begin(group.rollouts[0].rollout_id)
        await age(owner, group.rollouts[0].rollout_id)
    assert len(await stalls(story)) == 3

    await story.ledger.groups.set_state(ended.group_id, "dropped", None, "by the operator")
    await story.ledger.groups.set_state(parked.group_id, "parked", "infra", "waits")
    await story.ledger.rollouts.lose(settled.rollouts[0].rollout_id, "lost", "budget used up")

    assert await stalls(story) == []


async def test_longest_silence_comes_first(story: Story, owner: Database) -> None:
    group = await story.group(num_rollouts=2)
    for rollout in group.rollouts:
        await story.begin(rollout.rollout_id)
        await age(owner, rollout.rollout_id)
    await age(owner, group.rollouts[1].rollout_id)

    assert [stall.rollout_id for stall in await stalls(story)] == [
        group.rollouts[1].rollout_id,
        group.rollouts[0].rollout_id,
    ]
