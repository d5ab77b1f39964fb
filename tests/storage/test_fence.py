"""The fence under concurrency: what an attempt records is recorded before the next one begins, or not at all."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from storage import call_statements as sql
from storage.call_recording import recording, values_of
from storage.constraints import FENCE, broken_constraint
from storage.database import Database
from storage.errors import AttemptFenced, LeaseLost
from storage.ledger import Ledger
from storage.records import BegunAttempt
from tests.storage.building import Story, generated, selecting

pytestmark = pytest.mark.integration

BLOCKED = text("""
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
""")
DEADLINE_S = 60.0


async def blocked(owner: Database, waiting: Awaitable[object]) -> None:
    """Wait until a connection waits for a lock, which must be that of this task."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with owner.statement() as connection:
                if await connection.scalar(BLOCKED):
                    break
    assert isinstance(waiting, asyncio.Task)
    assert not waiting.done()


async def test_record_in_flight_is_waited_for_by_the_next_attempt_which_may_replay_it(
    story: Story, database: Database, owner: Database
) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")
    response = generated()

    async with database.transaction() as session:
        written = recording(lease, response, None)
        await session.execute(text("SELECT 1"))  # begins the transaction, which the driver's own call then belongs to
        driver_connection: Any = (await (await session.connection()).get_raw_connection()).driver_connection
        await driver_connection.execute(sql.RECORD, *values_of(lease, response, written, None))
        beginning = asyncio.create_task(story.try_to_begin(rollout_id))
        await blocked(owner, beginning)

    assert await beginning == BegunAttempt(attempt=1, sample=0, recorded=1, fresh_reason=None)
    assert (await story.ledger.calls.claim(rollout_id, 1, "request")).recorded is not None
    assert await story.ledger.checks.of(story.run_id) == []


async def test_record_that_waits_while_the_next_attempt_begins_is_refused(
    story: Story, database: Database, owner: Database
) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")

    async with database.transaction() as session:
        place = {"rollout_id": rollout_id}
        await session.execute(text("SELECT FROM rollouts WHERE rollout_id = :rollout_id FOR UPDATE"), place)
        late = asyncio.create_task(story.ledger.calls.record(lease, generated()))
        await blocked(owner, late)
        end = "UPDATE attempts SET state = 'abandoned', ended_at = now() WHERE rollout_id = :rollout_id"
        await session.execute(text(end), place)
        begin = "INSERT INTO attempts (rollout_id, attempt, worker) VALUES (:rollout_id, 1, 'w')"
        await session.execute(text(begin), place)
        await session.execute(text("UPDATE rollouts SET current_attempt = 1 WHERE rollout_id = :rollout_id"), place)

    with pytest.raises(AttemptFenced, match=r"Attempt 0 .* abandoned, the current attempt is 1"):
        await late
    assert await story.ledger.calls.of_attempt(rollout_id, 0) == []


async def test_older_attempt_that_wakes_up_can_do_nothing(story: Story) -> None:
    calls, rollouts = story.ledger.calls, story.ledger.rollouts
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    lease = await calls.claim(rollout_id, 0, "request")
    await story.begin(rollout_id)

    for work in (
        calls.record(lease, generated()),
        calls.fail(lease, "GenerationAborted", "too late"),
        calls.claim(rollout_id, 0, "another"),
        calls.measure(rollout_id, 0, 10),
        rollouts.settle(selecting(rollout_id, 0, [])),
    ):
        with pytest.raises(AttemptFenced):
            await work
    await calls.release(lease)
    assert await calls.of_attempt(rollout_id, 0) == []


async def test_rollout_that_is_no_longer_open_takes_no_calls(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")
    await story.ledger.rollouts.lose(rollout_id, "lost", "budget used up")

    with pytest.raises(AttemptFenced, match="it is abandoned"):
        await story.ledger.calls.record(lease, generated())


@pytest.mark.parametrize(
    "write",
    [
        "INSERT INTO model_calls (rollout_id, attempt, ordinal, outcome, sample) VALUES (:id, 0, 9, 'measured', 0)",
        "INSERT INTO model_call_leases (rollout_id, attempt, ordinal, sample, fingerprint, occurrence) "
        "VALUES (:id, 0, 9, 0, 'request', 0)",
        "INSERT INTO selected_responses (rollout_id, attempt, position, ordinal, segment) VALUES (:id, 0, 0, 0, 0)",
        "INSERT INTO seals (rollout_id, attempt, receipt) VALUES (:id, 0, 'forged')",
    ],
)
async def test_fence_is_in_the_tables_and_holds_for_the_owner_too(
    story: Story, database: Database, owner: Database, write: str
) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.begin(rollout_id)

    for connected in (database, owner):
        async with connected.transaction() as session:
            with pytest.raises(IntegrityError) as refused:
                await session.execute(text(write), {"id": rollout_id})
            await session.rollback()
        assert broken_constraint(refused.value) == FENCE


async def test_calls_and_new_attempts_at_the_same_time_neither_deadlock_nor_slip_through(
    ledger: Ledger, story: Story
) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    current = 0

    async def agent(number: int) -> int:
        """Call after call of whatever attempt was current when it looked; how many were accepted."""
        accepted = 0
        for turn in range(6):
            attempt = current
            try:
                lease = await ledger.calls.claim(rollout_id, attempt, f"request-{(number + turn) % 3}")
                if lease.recorded is None:
                    await ledger.calls.record(lease, generated(sampled=(number, turn)))
                accepted += 1
            except (AttemptFenced, LeaseLost):
                continue
        return accepted

    async def orchestrator() -> None:
        nonlocal current
        for _ in range(8):
            begun = await story.try_to_begin(rollout_id)
            assert isinstance(begun, BegunAttempt)
            current = begun.attempt

    async with asyncio.timeout(DEADLINE_S):
        accepted, _ = await asyncio.gather(asyncio.gather(*(agent(number) for number in range(8))), orchestrator())

    events = [event for attempt in range(current + 1) for event in await ledger.calls.of_attempt(rollout_id, attempt)]
    assert len(events) >= sum(accepted)
    assert any(accepted)
    assert await ledger.checks.of(story.run_id) == []
