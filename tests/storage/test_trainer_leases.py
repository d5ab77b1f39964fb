"""One trainer at a time writes for a run; whoever was replaced writes nothing, however late it wakes."""

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from configs.storage import StorageConfig
from storage.constraints import broken_constraint
from storage.database import Database
from storage.errors import TrainerFenced, TrainerLeaseHeld
from storage.trainer_leases import TrainerLease
from tests.storage.building import Story

pytestmark = pytest.mark.integration

EXPIRE = text("UPDATE trainer_leases SET expires_at = clock_timestamp() - interval '1 s' WHERE run_id = :run")
WAITING = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE $1
)
"""
PATIENCE_S = 60.0

Write = Callable[[Story, TrainerLease], Awaitable[object]]
WRITES: dict[str, Write] = {
    "apply": lambda story, lease: story.ledger.steps.apply(lease, 0, "b" * 64, {"loss": 0.5}, 0),
    "publish": lambda story, lease: story.ledger.weights.publish(lease, 1, "elsewhere", "digest"),
    "replace": lambda story, lease: story.ledger.weights.replace(lease, 0, "elsewhere", "other"),
    "record_checkpoint": lambda story, lease: story.ledger.weights.record_checkpoint(lease, 2, "elsewhere"),
    "forget_checkpoint": lambda story, lease: story.ledger.weights.forget_checkpoint(lease, 0),
}


async def expire(database: Database, story: Story) -> None:
    """The holder was silent for longer than its lease."""
    async with database.transaction() as session:
        await session.execute(EXPIRE, {"run": story.run_id})


async def state(story: Story) -> list[object]:
    """All that a trainer writes of its run."""
    weights = story.ledger.weights
    return [
        await story.ledger.steps.last_applied(story.run_id),
        await weights.get(story.run_id, 0),
        await weights.get(story.run_id, 1),
        await weights.checkpoints(story.run_id),
    ]


async def test_a_run_has_one_trainer_and_says_who_and_until_when(story: Story) -> None:
    leases = story.ledger.trainer_leases
    assert await leases.last(story.run_id) is None
    held = await leases.acquire(story.run_id, "first", 60)

    with pytest.raises(
        TrainerLeaseHeld, match=rf"'{story.run_id}' is held by the trainer first \(token 1\)"
    ) as refused:
        await leases.acquire(story.run_id, "second", 60)

    assert (refused.value.holder, refused.value.until) == ("first", held.expires_at)
    assert 0 < refused.value.remaining_s <= 60
    assert await leases.last(story.run_id) == held


async def test_every_taking_raises_the_token(story: Story, database: Database) -> None:
    leases = story.ledger.trainer_leases
    first = await leases.acquire(story.run_id, "first", 60)
    again = await leases.acquire(story.run_id, "first", 60)
    await leases.release(again)
    second = await leases.acquire(story.run_id, "second", 60)
    await expire(database, story)
    third = await leases.acquire(story.run_id, "third", 60)

    assert [lease.token for lease in (first, again, second, third)] == [1, 2, 3, 4]


async def test_of_many_trainers_at_once_one_gets_the_run(story: Story) -> None:
    leases = story.ledger.trainer_leases

    answers = await asyncio.gather(
        *(leases.acquire(story.run_id, f"trainer-{n}", 60) for n in range(8)), return_exceptions=True
    )

    taken = [answer for answer in answers if isinstance(answer, TrainerLease)]
    refused = [answer for answer in answers if isinstance(answer, TrainerLeaseHeld)]
    assert (len(taken), len(refused)) == (1, 7)
    assert {one.holder for one in refused} == {taken[0].holder}


async def test_a_dead_trainer_is_replaced_by_one_of_many(story: Story, database: Database) -> None:
    leases = story.ledger.trainer_leases
    await leases.acquire(story.run_id, "dead", 60)
    await expire(database, story)

    answers = await asyncio.gather(
        *(leases.acquire(story.run_id, f"trainer-{n}", 60) for n in range(8)), return_exceptions=True
    )

    assert [answer.token for answer in answers if isinstance(answer, TrainerLease)] == [2]


async def test_renewal_moves_the_end_and_keeps_the_token(story: Story, database: Database) -> None:
    leases = story.ledger.trainer_leases
    held = await leases.acquire(story.run_id, "first", 1)
    renewed = await leases.renew(held, 60)
    assert (renewed.token, renewed.acquired_at) == (held.token, held.acquired_at)
    assert (renewed.expires_at - held.expires_at).total_seconds() > 50

    await expire(database, story)
    late = await leases.renew(held, 60)  # nobody took it meanwhile
    with pytest.raises(TrainerLeaseHeld):
        await leases.acquire(story.run_id, "second", 60)
    assert late.token == held.token


async def test_a_replaced_trainer_neither_renews_nor_gives_back_what_is_not_its_own(
    story: Story, database: Database
) -> None:
    leases = story.ledger.trainer_leases
    first = await leases.acquire(story.run_id, "first", 60)
    await expire(database, story)
    second = await leases.acquire(story.run_id, "second", 60)

    with pytest.raises(TrainerFenced, match=r"Token 1 .* is fenced: second holds the run now \(token 2\)"):
        await leases.renew(first, 60)
    await leases.release(first)

    assert await leases.last(story.run_id) == second
    await leases.check(second)


async def test_what_was_given_back_is_free_at_once_and_writes_nothing_more(story: Story) -> None:
    leases = story.ledger.trainer_leases
    first = await leases.acquire(story.run_id, "first", 60)
    for _ in range(2):
        await leases.release(first)

    with pytest.raises(TrainerFenced, match="nobody holds the run"):
        await leases.check(first)
    assert (await leases.acquire(story.run_id, "second", 60)).token == 2


async def test_an_expired_lease_writes_until_another_trainer_takes_the_run(story: Story, database: Database) -> None:
    first = await story.lease("first")
    await expire(database, story)
    await story.ledger.weights.record_checkpoint(first, 1, "here")

    await story.lease("second")
    with pytest.raises(TrainerFenced):
        await story.ledger.weights.record_checkpoint(first, 2, "here")


@pytest.mark.parametrize("write", WRITES)
async def test_no_write_of_a_replaced_trainer_changes_anything(story: Story, database: Database, write: str) -> None:
    group = await story.sealed_group([1.0])
    await story.batch([group.group_id])
    first = await story.lease("first")
    await story.ledger.weights.publish(first, 0, "weights", "digest")
    await story.ledger.weights.record_checkpoint(first, 0, "checkpoint")
    await expire(database, story)
    second = await story.lease("second")
    before = await state(story)

    with pytest.raises(TrainerFenced, match=f"'{story.run_id}' is fenced: second holds the run now"):
        await WRITES[write](story, first)
    assert await state(story) == before

    await WRITES[write](story, second)
    assert await state(story) != before


@pytest.mark.parametrize("write", WRITES)
async def test_the_next_trainer_waits_for_a_write_under_way(
    story: Story, storage_config: StorageConfig, database: Database, write: str
) -> None:
    """The write has checked its token and not committed yet: the run is taken after it, never in between."""
    assert isinstance(storage_config.dsn, SecretStr)
    group = await story.sealed_group([1.0])
    await story.batch([group.group_id])
    first = await story.lease("first")
    await story.ledger.weights.publish(first, 0, "weights", "digest")
    await story.ledger.weights.record_checkpoint(first, 0, "checkpoint")
    await expire(database, story)
    table = {"apply": "batches", "publish": "policy_versions", "replace": "policy_versions"}.get(write, "checkpoints")
    dsn = storage_config.dsn.get_secret_value()
    blocker, onlooker = await asyncpg.connect(dsn), await asyncpg.connect(dsn)

    async def waits(query: str) -> None:
        while not await onlooker.fetchval(WAITING, query):
            await asyncio.sleep(0.02)

    try:
        async with asyncio.timeout(PATIENCE_S):
            holding = blocker.transaction()
            await holding.start()
            await blocker.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
            writing = asyncio.ensure_future(WRITES[write](story, first))
            await waits(f"%{table}%")
            taking = asyncio.ensure_future(story.lease("second"))
            await waits("%INSERT INTO trainer_leases%")
            assert not writing.done()
            await holding.rollback()
            await writing
            assert (await taking).token == first.token + 1
    finally:
        await blocker.close()
        await onlooker.close()


async def test_no_row_is_removed_so_no_token_is_given_twice(story: Story, database: Database) -> None:
    await story.lease()
    async with database.transaction() as session:
        with pytest.raises(ProgrammingError, match="permission denied"):
            await session.execute(text("DELETE FROM trainer_leases"))
        await session.rollback()


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("UPDATE trainer_leases SET token = 0", "trainer_leases_positive_check"),
        ("UPDATE trainer_leases SET holder = ' '", "trainer_leases_not_blank_check"),
    ],
)
async def test_tables_refuse_a_lease_of_nobody(story: Story, database: Database, change: str, constraint: str) -> None:
    await story.lease()
    async with database.transaction() as session:
        with pytest.raises(IntegrityError) as refused:
            await session.execute(text(change))
        await session.rollback()
    assert broken_constraint(refused.value) == constraint
