"""Prompt claims: no position skipped, none repeated, whoever asks, how often, and at the same time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ledger import Ledger
from storage.records import Claim
from tests.storage.building import Story, start_run

pytestmark = pytest.mark.integration

request = st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))


def pick(position: int) -> tuple[int, str]:
    """A dataset of seven rows, gone through again and again."""
    return position % 7, f"prompt-{position % 7}"


async def test_claims_take_the_next_positions_in_order_of_slots(story: Story) -> None:
    claims = story.ledger.prompts.claim
    await claims(story.run_id, 0, "train", 0, 3, pick)

    assert await claims(story.run_id, 1, "train", 0, 2, pick) == (
        Claim(step=1, slot=0, position=3, row_index=3, prompt_id="prompt-3"),
        Claim(step=1, slot=1, position=4, row_index=4, prompt_id="prompt-4"),
    )


async def test_claim_that_is_repeated_returns_what_is_stored_though_the_order_changed(story: Story) -> None:
    first = await story.ledger.prompts.claim(story.run_id, 0, "train", 0, 3, pick)

    again = await story.ledger.prompts.claim(story.run_id, 0, "train", 0, 3, lambda position: (99, "other"))

    assert again == first


async def test_validation_claims_take_the_position_of_their_slot_at_every_version(story: Story) -> None:
    for version in (0, 4):
        claims = await story.ledger.prompts.claim(story.run_id, version, "validation", 1, 2, pick)
        assert [(claim.slot, claim.position) for claim in claims] == [(1, 1), (2, 2)]

    train = await story.ledger.prompts.claim(story.run_id, 0, "train", 0, 1, pick)
    assert train[0].position == 0


async def test_pick_that_fails_claims_nothing(story: Story) -> None:
    def broken(position: int) -> tuple[int, str]:
        if position == 1:
            raise ValueError("row 1 is malformed")
        return pick(position)

    with pytest.raises(ValueError, match="row 1"):
        await story.ledger.prompts.claim(story.run_id, 0, "train", 0, 2, broken)

    assert (await story.ledger.prompts.claim(story.run_id, 5, "train", 0, 1, pick))[0].position == 0


async def test_next_slot_is_the_first_without_a_training_prompt(story: Story) -> None:
    prompts = story.ledger.prompts
    assert await prompts.next_slot(story.run_id, 0) == 0
    await prompts.claim(story.run_id, 0, "train", 0, 2, pick)
    await prompts.claim(story.run_id, 0, "train", 3, 1, pick)
    await prompts.claim(story.run_id, 0, "validation", 0, 5, pick)
    await prompts.claim(story.run_id, 1, "train", 0, 1, pick)

    assert await prompts.next_slot(story.run_id, 0) == 2
    assert await prompts.next_slot(story.run_id, 1) == 1


async def test_diagnostic_copy_claims_no_prompt(story: Story) -> None:
    with pytest.raises(ValueError, match="has the prompt of its original"):
        await story.ledger.prompts.claim(story.run_id, 0, "diagnostic", 0, 1, pick)


@settings(max_examples=15, deadline=None)
@given(requests=st.lists(request, min_size=1, max_size=8))
async def test_claims_at_the_same_time_skip_and_repeat_nothing(
    ledger: Ledger, requests: list[tuple[int, int, int]]
) -> None:
    run_id = (await start_run(ledger)).run_id

    answers = await asyncio.gather(
        *(ledger.prompts.claim(run_id, step, "train", first, count, pick) for step, first, count in requests)
    )

    claimed = {(claim.step, claim.slot): claim for answer in answers for claim in answer}
    asked = {(step, slot) for step, first, count in requests for slot in range(first, first + count)}
    assert claimed.keys() == asked
    assert sorted(claim.position for claim in claimed.values()) == list(range(len(asked)))
    for (step, first, count), answer in zip(requests, answers, strict=True):
        assert answer == tuple(claimed[step, slot] for slot in range(first, first + count))
