"""Diagnostic copies: what the original recorded, under the same numbers, to be replayed and never to be counted."""

import asyncio
from pathlib import Path

import pytest
from pydantic import SecretStr
from sqlalchemy import text

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import BlobMissing, IllegalTransition, UnknownGroup
from storage.ledger import Ledger
from storage.records import BegunAttempt, GroupRecord, Settlement
from tests.storage.building import Story, selecting

pytestmark = pytest.mark.integration


async def eventful_group(story: Story) -> GroupRecord:
    """A trained group: one rollout that replayed and settled, one masked for its content, one lost, one never begun."""
    ledger = story.ledger
    group = await story.group(num_rollouts=4)
    replayed, masked, lost, untouched = (rollout.rollout_id for rollout in group.rollouts)
    await story.begin(replayed)
    first = await story.generate(replayed, 0, (1, 2, 3), (4, 5), fingerprint="first")
    await story.generate(replayed, 0, (1, 2, 3, 4, 5, 6), (7,), after=first, fingerprint="second")
    await ledger.calls.claim(replayed, 0, "hanging")
    await ledger.rollouts.fail_attempt(replayed, 0, "agent", "infra", "http_500", "the agent said 500")
    await story.begin(replayed)
    await ledger.calls.claim(replayed, 1, "first")
    second = (await ledger.calls.claim(replayed, 1, "second")).recorded
    await story.generate(replayed, 1, (1, 2, 3, 4, 5, 6, 7, 8), (9,), after=second, fingerprint="third")
    await ledger.calls.measure(replayed, 1, 12)
    await ledger.rollouts.settle(selecting(replayed, 1, [0, 1, 2]))

    await story.begin(masked)
    await story.generate(masked, 0, fingerprint="first")
    await ledger.calls.fail(await ledger.calls.claim(masked, 0, "long"), "PromptTooLong", "4097 tokens of 4096")
    await ledger.rollouts.settle(
        Settlement(rollout_id=masked, attempt=0, state="masked", reason="PromptTooLong", segments=0)
    )

    await story.begin(lost)
    await story.generate(lost, 0, fingerprint="first")
    await ledger.rollouts.fail_attempt(lost, 0, "model", "data", "NoGeneration", "no tokens")
    await story.begin(lost)
    await story.generate(lost, 1, fingerprint="first")
    await ledger.rollouts.fail_attempt(lost, 1, "model", "data", "NoGeneration", "no tokens again")
    await ledger.rollouts.lose(lost, "lost", "2 data failures")
    await ledger.rollouts.lose(untouched, "lost", "no worker")
    await ledger.groups.set_state(group.group_id, "sealed")
    await story.train([group.group_id])
    return await ledger.groups.get(group.group_id)


async def test_copy_is_an_open_group_with_the_attempts_and_calls_of_its_original(story: Story) -> None:
    original = await eventful_group(story)

    copy = await story.ledger.copies.open(original.group_id)

    assert (copy.group_id, copy.purpose, copy.state) == (f"{original.group_id}/replay-0", "diagnostic", "open")
    assert (copy.copy_of, copy.replaces, copy.ended_order) == (original.group_id, None, None)
    for mine, theirs in zip(copy.rollouts, original.rollouts, strict=True):
        assert mine.rollout_id == f"{copy.group_id}/rollout-{theirs.index}"
        assert (mine.state, mine.current_attempt, mine.settled_attempt) == ("open", theirs.current_attempt, None)
        for attempt, before in zip(mine.attempts, theirs.attempts, strict=True):
            same = {"attempt", "worker", "sample", "fresh_reason", "boundary", "failure_class", "cause", "started_at"}
            assert attempt.model_dump(include=same) == before.model_dump(include=same)
            assert attempt.ended_at == before.ended_at
            calls, leases = story.ledger.calls.of_attempt, story.ledger.calls.leases
            assert await calls(mine.rollout_id, attempt.attempt) == await calls(theirs.rollout_id, attempt.attempt)
            assert [
                lease.model_copy(update={"rollout_id": theirs.rollout_id})
                for lease in await leases(mine.rollout_id, attempt.attempt)
            ] == await leases(theirs.rollout_id, attempt.attempt)
    states = [[attempt.state for attempt in rollout.attempts] for rollout in copy.rollouts]
    assert states == [["failed", "abandoned"], ["abandoned"], ["abandoned", "abandoned"], []]
    assert await story.ledger.groups.get(original.group_id) == original
    assert await story.ledger.checks.of(story.run_id) == []


async def test_next_attempt_of_a_copy_replays_what_is_recorded_and_goes_live_where_it_differs(story: Story) -> None:
    original = await eventful_group(story)
    copy = await story.ledger.copies.open(original.group_id)
    replayed, masked, lost, untouched = (rollout.rollout_id for rollout in copy.rollouts)

    begun = [await story.try_to_begin(rollout_id, policy_version=50) for rollout_id in (replayed, masked, lost)]

    assert begun == [
        BegunAttempt(attempt=2, sample=0, recorded=3, fresh_reason=None),
        BegunAttempt(attempt=1, sample=0, recorded=1, fresh_reason=None),
        BegunAttempt(attempt=2, sample=1, recorded=1, fresh_reason=None),
    ]
    assert await story.try_to_begin(untouched) == BegunAttempt(attempt=0, sample=0, recorded=0, fresh_reason=None)
    calls = story.ledger.calls
    answers = [(await calls.claim(replayed, 2, request)).recorded for request in ("first", "second", "third", "new")]
    assert [answer.sampled_token_ids if answer else None for answer in answers] == [(4, 5), (7,), (9,), None]
    assert (await calls.claim(masked, 1, "first")).recorded is not None
    assert (await calls.claim(masked, 1, "long")).recorded is None
    await story.ledger.rollouts.settle(selecting(replayed, 2, [0, 1, 2]))
    for rollout_id in (masked, lost, untouched):
        await story.ledger.rollouts.lose(rollout_id, "lost", "enough seen")
    assert (await story.ledger.groups.set_state(copy.group_id, "sealed")).state == "sealed"
    assert await story.ledger.checks.of(story.run_id) == []


async def test_attempt_of_a_copy_that_fails_for_its_data_is_followed_by_a_fresh_sample(story: Story) -> None:
    original = await eventful_group(story)
    copy = await story.ledger.copies.open(original.group_id)
    rollout_id = copy.rollouts[2].rollout_id
    attempt = await story.begin(rollout_id)
    await story.ledger.rollouts.fail_attempt(rollout_id, attempt, "model", "data", "NoGeneration", "no tokens")

    assert await story.try_to_begin(rollout_id) == BegunAttempt(
        attempt=3, sample=2, recorded=0, fresh_reason="after a data failure: NoGeneration"
    )


async def test_fresh_sample_may_be_asked_of_a_copy_too(story: Story) -> None:
    original = await eventful_group(story)
    copy = await story.ledger.copies.open(original.group_id)

    begun = await story.try_to_begin(copy.rollouts[0].rollout_id, fresh_after=1)

    assert isinstance(begun, BegunAttempt)
    assert (begun.sample, begun.recorded) == (1, 0)


async def test_copy_counts_nowhere(story: Story) -> None:
    original = await eventful_group(story)
    before = await story.ledger.summaries.of(story.run_id)
    budgets = await story.ledger.budgets.of(story.run_id)

    copy = await story.ledger.copies.open(original.group_id)
    for rollout in copy.rollouts:
        await story.begin(rollout.rollout_id)
        await story.generate(rollout.rollout_id, 2 if rollout.index in (0, 2) else int(rollout.index == 1), (8,))
        await story.ledger.rollouts.lose(rollout.rollout_id, "lost", "given up")
    await story.ledger.groups.set_state(copy.group_id, "dropped", "infra", "no valid rollout")

    assert await story.ledger.summaries.of(story.run_id) == before
    assert before.identity_holds
    assert await story.ledger.budgets.of(story.run_id) == budgets
    assert [group.group_id for group in await story.ledger.groups.list(story.run_id, purpose="train")] == [
        original.group_id
    ]


async def test_copies_of_one_group_have_names_of_their_own(story: Story) -> None:
    original = await story.sealed_group([1.0])

    copies = await asyncio.gather(*(story.ledger.copies.open(original.group_id) for _ in range(3)))
    of_a_copy = await story.give_up(copies[0].group_id)

    assert sorted(copy.group_id for copy in copies) == [f"{original.group_id}/replay-{k}" for k in range(3)]
    assert (await story.ledger.copies.open(of_a_copy.group_id)).copy_of == of_a_copy.group_id


async def test_copy_of_a_promoted_group_keeps_the_step_that_it_was_opened_for(story: Story) -> None:
    lost, ready = await story.dropped_group(step=2), await story.sealed_group([1.0], step=4)
    await story.ledger.groups.promote(ready.group_id, 2, lost.group_id)

    copy = await story.ledger.copies.open(ready.group_id)

    assert (copy.step, copy.train_step, copy.replaces) == (4, 4, None)


@pytest.mark.parametrize("state", ["open", "parked"])
async def test_group_that_has_not_ended_is_not_copied(story: Story, state: str) -> None:
    group = await story.group()
    if state == "parked":
        await story.ledger.groups.set_state(group.group_id, "parked", "infra", "waits")

    with pytest.raises(IllegalTransition, match=f"is {state} and cannot become the original of a replay"):
        await story.ledger.copies.open(group.group_id)
    assert len(await story.ledger.groups.list(story.run_id)) == 1


async def test_unknown_group_is_not_copied(ledger: Ledger) -> None:
    with pytest.raises(UnknownGroup, match="nowhere"):
        await ledger.copies.open("nowhere")


async def test_large_payloads_are_shared_and_a_copy_without_them_is_refused(
    story: Story, storage_config: StorageConfig, owner: Database, tmp_path: Path
) -> None:
    assert storage_config.dsn is not None
    config = StorageConfig(
        dsn=SecretStr(storage_config.dsn.get_secret_value()), blobs_url=str(tmp_path), inline_payload_bytes=0
    )
    database = Database(config)
    large = Story(Ledger(database, BlobStore(config.blobs_url)), story.run_id)
    rollout_id = await large.open_rollout()
    await large.begin(rollout_id)
    await large.generate(rollout_id, 0)
    await large.ledger.rollouts.settle(selecting(rollout_id, 0, [0]))
    group_id = large.group_id(0, 0)
    await large.ledger.groups.set_state(group_id, "sealed")

    copy = await large.ledger.copies.open(group_id)

    await large.begin(copy.rollouts[0].rollout_id)
    recorded = (await large.ledger.calls.claim(copy.rollouts[0].rollout_id, 1, "request")).recorded
    assert recorded is not None
    blobs = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in blobs] == [recorded.digest]
    blobs[0].unlink()
    with pytest.raises(BlobMissing, match=recorded.digest):
        await large.ledger.copies.open(group_id)
    async with owner.transaction() as session:
        count = text("SELECT count(*) FROM groups WHERE copy_of = :group_id")
        assert await session.scalar(count, {"group_id": group_id}) == 1
    await database.close()


async def test_copy_of_a_dropped_group_whose_attempt_still_runs_is_whole(story: Story) -> None:
    rollout_id = await story.open_rollout()
    await story.begin(rollout_id)
    await story.generate(rollout_id, 0, fingerprint="first")
    await story.ledger.groups.set_state(story.group_id(0, 0), "dropped", None, "by the operator")

    async def agent() -> None:
        for turn in range(12):
            await story.generate(rollout_id, 0, (turn + 1,), (turn,), fingerprint=f"turn-{turn}")

    copies, _ = await asyncio.gather(
        asyncio.gather(*(story.ledger.copies.open(story.group_id(0, 0)) for _ in range(4))), agent()
    )

    assert all(copy.rollouts[0].attempts[0].state == "abandoned" for copy in copies)
    assert await story.ledger.checks.of(story.run_id) == []
