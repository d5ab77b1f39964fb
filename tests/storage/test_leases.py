"""Leases: an attempt holds an occurrence until it is released; what is recorded stays held."""

import asyncio

import pytest

from storage.errors import CallConflict, LeaseLost, UnknownAttempt, UnknownRollout
from tests.storage.building import Story, generated

pytestmark = pytest.mark.integration


async def test_response_recorded_twice_is_recorded_once(story: Story, rollout_id: str) -> None:
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")
    response = generated()

    recorded = await asyncio.gather(*(story.ledger.calls.record(lease, response) for _ in range(4)))

    assert all(one == recorded[0] for one in recorded)
    assert len(await story.ledger.calls.of_attempt(rollout_id, 0)) == 1


async def test_another_response_of_the_same_call_is_refused(story: Story, rollout_id: str) -> None:
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")
    await story.ledger.calls.record(lease, generated(sampled=(4, 5)))

    with pytest.raises(CallConflict, match="Call 0 of attempt 0"):
        await story.ledger.calls.record(lease, generated(sampled=(4, 6)))
    with pytest.raises(CallConflict):
        await story.ledger.calls.fail(lease, "GenerationAborted", "too late")


async def test_released_occurrence_goes_to_the_next_equal_request(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    lease = await calls.claim(rollout_id, 0, "request")
    await calls.release(lease)

    again = await calls.claim(rollout_id, 0, "request")

    assert (again.ordinal, again.occurrence) == (1, 0)
    with pytest.raises(LeaseLost, match="was released, or never claimed"):
        await calls.record(lease, generated())


async def test_release_after_the_response_was_recorded_keeps_it_held(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    lease = await calls.claim(rollout_id, 0, "request")
    await calls.record(lease, generated())
    await calls.release(lease)

    assert (await calls.claim(rollout_id, 0, "request")).occurrence == 1
    assert (await calls.leases(rollout_id, 0))[0].released_at is None


async def test_failed_call_keeps_its_cause_and_may_be_claimed_again(story: Story, rollout_id: str) -> None:
    calls = story.ledger.calls
    lease = await calls.claim(rollout_id, 0, "request")
    for _ in range(2):
        await calls.fail(lease, "GenerationUnavailable", "connection refused")

    again = await calls.claim(rollout_id, 0, "request")

    assert (again.ordinal, again.occurrence) == (1, 0)
    (failed,) = await calls.of_attempt(rollout_id, 0)
    assert (failed.outcome, failed.failure_class, failed.cause) == (
        "failed",
        "GenerationUnavailable",
        "connection refused",
    )
    with pytest.raises(CallConflict):
        await calls.fail(lease, "NoGeneration", "another story")


async def test_call_that_was_never_claimed_is_not_failed(story: Story, rollout_id: str) -> None:
    lease = await story.ledger.calls.claim(rollout_id, 0, "request")
    with pytest.raises(LeaseLost):
        await story.ledger.calls.fail(lease.model_copy(update={"ordinal": 5}), "NoGeneration", "no tokens")


async def test_unknown_rollout_and_attempt_are_named(story: Story, rollout_id: str) -> None:
    with pytest.raises(UnknownRollout, match="nowhere"):
        await story.ledger.calls.claim("nowhere", 0, "request")
    with pytest.raises(UnknownAttempt, match="no attempt 3"):
        await story.ledger.calls.claim(rollout_id, 3, "request")
    with pytest.raises(UnknownAttempt):
        await story.ledger.calls.measure(rollout_id, 3, 1)
