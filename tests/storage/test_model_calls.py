"""Model calls: recorded once, answered from the ledger afterwards, and counted for what they were."""

import asyncio
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import LineageBroken
from storage.model_calls import ModelCalls
from storage.models.model_calls import ModelCall as Row
from storage.records import CallPosition, GeneratedResponse, WeightSpan
from tests.storage.building import Story, generated

pytestmark = pytest.mark.integration


async def test_recorded_response_is_replayed_bit_by_bit(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    response = generated(
        prompt=(11, 12, 2**31 - 1),
        sampled=(13, 14),
        log_probs=(-1 / 3, -math.pi),
        body=b'{"content": "\xf0\x9f\xa7\x97 "}\n',
        weight_versions=(
            WeightSpan(version="policy-0", start=0, end=1),
            WeightSpan(version="policy-1", start=1, end=2),
        ),
        conversation="key",
        started_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    )
    lease = await calls.claim(rollout_id, 0, "request")
    recorded = await calls.record(lease, response)
    await story.begin(rollout_id)

    again = await calls.claim(rollout_id, 1, "request")

    assert again.recorded == recorded
    assert GeneratedResponse(**recorded.model_dump(include=set(GeneratedResponse.model_fields))) == response
    assert (recorded.position, recorded.sample, recorded.fingerprint, recorded.occurrence) == (
        CallPosition(attempt=0, ordinal=0),
        0,
        "request",
        0,
    )


async def test_equal_requests_of_an_attempt_are_different_occurrences(story: Story, rollout_id: str) -> None:
    leases = [await story.ledger.calls.claim(rollout_id, 0, "request") for _ in range(3)]

    assert [(lease.ordinal, lease.occurrence) for lease in leases] == [(0, 0), (1, 1), (2, 2)]


async def test_parallel_claims_get_an_ordinal_and_an_occurrence_each(story: Story, rollout_id: str) -> None:
    leases = await asyncio.gather(*(story.ledger.calls.claim(rollout_id, 0, "request") for _ in range(8)))

    assert sorted(lease.ordinal for lease in leases) == list(range(8))
    assert sorted(lease.occurrence for lease in leases) == list(range(8))


async def test_best_of_n_is_replayed_as_the_same_samples(story: Story, rollout_id: str) -> None:
    for number in range(4):
        await story.generate(rollout_id, 0, sampled=(number,))
    await story.begin(rollout_id)

    leases = await asyncio.gather(*(story.ledger.calls.claim(rollout_id, 1, "request") for _ in range(5)))

    answers = [None if lease.recorded is None else lease.recorded.sampled_token_ids for lease in leases]
    assert sorted(answers, key=str) == [(0,), (1,), (2,), (3,), None]


async def test_occurrence_that_was_lost_does_not_keep_the_recorded_ones_from_being_replayed(
    story: Story, rollout_id: str
) -> None:
    calls = story.ledger.calls
    await calls.claim(rollout_id, 0, "request")  # its process died
    kept = await story.generate(rollout_id, 0)
    await story.begin(rollout_id)

    first, second = await calls.claim(rollout_id, 1, "request"), await calls.claim(rollout_id, 1, "request")

    assert (first.occurrence, first.recorded) == (1, kept)
    assert (second.occurrence, second.recorded) == (0, None)


async def test_first_call_that_differs_goes_live(story: Story, rollout_id: str) -> None:
    await story.generate(rollout_id, 0, fingerprint="first")
    await story.begin(rollout_id)

    assert (await story.ledger.calls.claim(rollout_id, 1, "another")).recorded is None


async def test_fresh_sample_replays_nothing(story: Story, rollout_id: str) -> None:
    await story.generate(rollout_id, 0)
    await story.try_to_begin(rollout_id, recovery="fresh")

    lease = await story.ledger.calls.claim(rollout_id, 1, "request")

    assert (lease.sample, lease.occurrence, lease.recorded) == (1, 0, None)
    await story.ledger.calls.record(lease, generated())


async def test_siblings_do_not_share_recordings(story: Story) -> None:
    one, other = (rollout.rollout_id for rollout in (await story.group(num_rollouts=2)).rollouts)
    for rollout_id in (one, other):
        await story.begin(rollout_id)
    await story.generate(one, 0)
    await story.begin(other)

    assert (await story.ledger.calls.claim(other, 1, "request")).recorded is None


async def test_third_attempt_replays_what_the_first_and_the_second_recorded(story: Story, rollout_id: str) -> None:
    first = await story.generate(rollout_id, 0, (1,), (2,), fingerprint="first")
    await story.begin(rollout_id)
    await story.ledger.calls.claim(rollout_id, 1, "first")
    second = await story.generate(rollout_id, 1, (1, 2, 3), (4,), after=first, fingerprint="second")
    await story.begin(rollout_id)

    assert (await story.ledger.calls.claim(rollout_id, 2, "first")).recorded == first
    assert (await story.ledger.calls.claim(rollout_id, 2, "second")).recorded == second
    assert second.position == CallPosition(attempt=1, ordinal=1)


async def test_only_the_tokens_that_the_parent_lacks_are_stored(
    story: Story, rollout_id: str, database: Database
) -> None:
    first = await story.generate(rollout_id, 0, range(100), (7, 8), fingerprint="first")
    prompt = (*range(100), 7, 8, 9)
    second = await story.generate(rollout_id, 0, prompt, (10,), after=first, fingerprint="second")

    async with database.transaction() as session:
        row = await session.get_one(Row, (rollout_id, 0, 1))
    assert row.tokens == b"\x09\x00\x00\x00\x0a\x00\x00\x00"
    assert (row.prefix_tokens, row.prompt_tokens, row.generated_tokens) == (102, 103, 1)
    assert second.prompt_token_ids == prompt


async def test_prompt_that_is_not_the_parents_continuation_is_refused(story: Story, rollout_id: str) -> None:
    first = await story.generate(rollout_id, 0, (1, 2), (3,), fingerprint="first")

    for prompt, cause in (((1, 2, 4, 5), "does not start with the 3 tokens"), ((1, 2), "is shorter than the 3 tokens")):
        with pytest.raises(LineageBroken, match=cause):
            await story.generate(rollout_id, 0, prompt, after=first, fingerprint="second")
    elsewhere = first.model_copy(update={"position": CallPosition(attempt=0, ordinal=99)})
    with pytest.raises(LineageBroken, match="call 99 of attempt 0, is no generated response"):
        await story.generate(rollout_id, 0, (1, 2, 3, 4), after=elsewhere, fingerprint="second")


async def test_parent_of_another_sample_is_refused(story: Story, rollout_id: str) -> None:
    first = await story.generate(rollout_id, 0, (1, 2), (3,))
    await story.try_to_begin(rollout_id, recovery="fresh")

    with pytest.raises(LineageBroken, match="its parent is of sample 0, the call of sample 1"):
        await story.generate(rollout_id, 1, (1, 2, 3, 4), after=first)


async def test_events_of_an_attempt_are_told_in_order(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    first = await story.generate(rollout_id, 0, fingerprint="first")
    await story.begin(rollout_id)
    await calls.claim(rollout_id, 1, "first")
    await calls.measure(rollout_id, 1, 77)
    await calls.fail(await calls.claim(rollout_id, 1, "second"), "ContextOverflow", "8423 tokens")
    second = await story.generate(rollout_id, 1, (1, 2, 3, 4, 5, 6), after=first, fingerprint="second")
    in_flight = await calls.claim(rollout_id, 1, "third")

    replayed, measured, failed, generated_call = await calls.of_attempt(rollout_id, 1)

    assert (replayed.outcome, replayed.replayed_from, replayed.position) == ("replayed", 0, first.position)
    assert (replayed.sampled_token_ids, replayed.log_probs, replayed.body) == (
        first.sampled_token_ids,
        first.log_probs,
        first.body,
    )
    assert (measured.outcome, measured.prompt_tokens, measured.position) == ("measured", 77, None)
    assert (failed.outcome, failed.failure_class, failed.body) == ("failed", "ContextOverflow", None)
    assert (generated_call.outcome, generated_call.position, generated_call.parent) == (
        "generated",
        second.position,
        first.position,
    )
    assert generated_call.prompt_token_ids == (1, 2, 3, 4, 5, 6)
    assert [call.ordinal for call in (replayed, measured, failed, generated_call)] == [0, 1, 2, 3]
    leases = await calls.leases(rollout_id, 1)
    assert [lease.ordinal for lease in leases] == [0, 2, 3, in_flight.ordinal]
    assert [lease.released_at is None for lease in leases] == [True, False, True, True]


async def test_parents_are_the_calls_that_this_attempt_saw(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    first = await story.generate(rollout_id, 0, (1, 2), (3,), fingerprint="first", conversation="key")
    await story.generate(rollout_id, 0, (1, 2), (4,), fingerprint="second", conversation="key")
    await story.begin(rollout_id)
    assert await calls.parents_by_conversation(rollout_id, 1, "key") == []
    await calls.claim(rollout_id, 1, "first")

    (parent,) = await calls.parents_by_conversation(rollout_id, 1, "key")

    assert (parent.position, parent.token_ids) == (first.position, (1, 2, 3))
    assert await calls.parents_by_tokens(rollout_id, 1, first.cumulative_digest) == [parent]
    assert len(await calls.parents_by_conversation(rollout_id, 0, "key")) == 2
    assert await calls.parents_by_conversation(rollout_id, 0, "other") == []


@pytest.mark.parametrize(("inline_payload_bytes", "in_blob"), [(0, True), (1000, False)])
async def test_configured_size_decides_what_large_is(
    story: Story,
    rollout_id: str,
    storage_config: StorageConfig,
    blobs: BlobStore,
    inline_payload_bytes: int,
    in_blob: bool,
) -> None:
    database = Database(storage_config.model_copy(update={"inline_payload_bytes": inline_payload_bytes}))
    try:
        calls = ModelCalls(database, blobs)
        recorded = await calls.record(await calls.claim(rollout_id, 0, "request"), generated())
        async with database.transaction() as session:
            row = await session.get_one(Row, (rollout_id, 0, 0))
        assert row.blob == (recorded.digest if in_blob else None)
        assert (row.tokens is None) == in_blob
    finally:
        await database.close()


async def test_large_payload_is_kept_in_the_blob_store(
    story: Story, rollout_id: str, database: Database, blobs: BlobStore
) -> None:
    body = b"x" * 70_000
    first = await story.generate(rollout_id, 0, range(50), (7, 8), fingerprint="first", body=body)
    second = await story.generate(rollout_id, 0, (*range(50), 7, 8, 9), (1,), after=first, fingerprint="second")
    await story.begin(rollout_id)

    async with database.transaction() as session:
        row = await session.get_one(Row, (rollout_id, 0, 0))
    assert (row.tokens, row.log_probs, row.body, row.blob) == (None, None, None, first.digest)
    assert len(await blobs.get(first.digest)) == 52 * 4 + 2 * 8 + 70_000
    assert [(await story.ledger.calls.claim(rollout_id, 1, key)).recorded for key in ("first", "second")] == [
        first,
        second,
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"log_probs": (-0.1,)}, "1 log-probabilities for 2 sampled tokens"),
        ({"log_probs": (-0.1, float("nan"))}, "finite number"),
        ({"log_probs": (-0.1, float("-inf"))}, "finite number"),
        ({"sampled_token_ids": (), "log_probs": ()}, "at least 1"),
        ({"weight_versions": ()}, "cover 0 of 2"),
        ({"weight_versions": (WeightSpan(version="policy-0", start=1, end=2),)}, "does not follow token 0"),
        ({"continuity": "append"}, "continuity append and parent None"),
        ({"continuity": "new_segment"}, "new segment without a reason"),
        ({"parent": CallPosition(attempt=0, ordinal=0)}, "continuity root and parent"),
    ],
)
def test_response_that_is_not_whole_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        generated(**change)
