"""Promotions: a ready group of a later step trains in an earlier one, once, and never in the past."""

import asyncio

import pytest

from storage.errors import BatchGroupRefused, IllegalTransition, StepClosed, UnknownGroup
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def refused_late(story: Story) -> int:
    return (await story.ledger.summaries.of(story.run_id)).groups.refused_late


async def test_promoted_group_trains_in_the_earlier_step_and_in_no_other(story: Story) -> None:
    lost, ready = await story.dropped_group(step=2), await story.sealed_group([1.0], step=4)

    promoted = await story.ledger.groups.promote(ready.group_id, 2, lost.group_id)

    assert (promoted.step, promoted.train_step, promoted.replaces) == (4, 2, lost.group_id)
    assert promoted.ended_order == ready.ended_order
    with pytest.raises(BatchGroupRefused):
        await story.batch([ready.group_id], step=4)
    await story.train([ready.group_id], step=2)
    assert (await story.ledger.groups.get(ready.group_id)).state == "trained"
    summary = await story.ledger.summaries.of(story.run_id)
    assert (summary.groups.promoted, summary.groups.trained, summary.groups.refused_late) == (1, 1, 0)
    assert summary.identity_holds


async def test_promotion_again_is_a_no_op_even_when_the_step_has_closed(story: Story) -> None:
    lost, ready = await story.dropped_group(step=2), await story.sealed_group([1.0], step=4)
    promoted = await story.ledger.groups.promote(ready.group_id, 2, lost.group_id)
    await story.batch([ready.group_id], step=2)

    assert await story.ledger.groups.promote(ready.group_id, 2, lost.group_id) == promoted
    assert await story.group(step=4, num_rollouts=1) == promoted  # its workflow may open it again
    assert await refused_late(story) == 0


async def test_promotion_into_the_past_is_refused_and_counted(story: Story) -> None:
    lost, ready = await story.dropped_group(step=2), await story.sealed_group([1.0], step=4)
    await story.train([], step=2)

    with pytest.raises(StepClosed, match=r"Step 2 .* is closed: .* is sealed, stays in its own step"):
        await story.ledger.groups.promote(ready.group_id, 2, lost.group_id)

    assert await story.ledger.groups.get(ready.group_id) == ready
    assert await refused_late(story) == 1


async def test_group_that_cannot_be_promoted_stays_and_the_refusal_says_why(story: Story) -> None:
    promote = story.ledger.groups.promote
    lost, kept = await story.dropped_group(step=2), await story.sealed_group([1.0], step=2, slot=1)
    ready, still_open = await story.sealed_group([1.0], step=4), await story.group(step=4, slot=1)
    later_lost = await story.dropped_group(step=4, slot=2)
    spare = await story.sealed_group([1.0], step=4, slot=3, replaces=later_lost.group_id)
    evaluation = await story.group(step=4, purpose="validation", num_rollouts=1)
    await story.settle(evaluation.rollouts[0].rollout_id, 1.0)
    await story.ledger.groups.set_state(evaluation.group_id, "sealed")
    in_batch = await story.sealed_group([1.0], step=5)
    await story.batch([in_batch.group_id], step=5)
    refusals = [
        (ready, 4, later_lost, "it trains in step 4, which is not a later one"),
        (kept, 3, lost, "it trains in step 2, which is not a later one"),
        (still_open, 2, lost, "only a sealed group is promoted"),
        (spare, 2, lost, "it has the place of group"),
        (evaluation, 2, lost, "it is a validation group"),
        (in_batch, 2, lost, "it is in the batch of step 5"),
        (ready, 2, kept, "it keeps its place in step 2 until it is dropped"),
        (ready, 3, lost, "it has no place in step 3"),
    ]

    for group, to_step, replaces, why in refusals:
        before = await story.ledger.groups.get(group.group_id)
        with pytest.raises(IllegalTransition, match=why):
            await promote(group.group_id, to_step, replaces.group_id)
        assert await story.ledger.groups.get(group.group_id) == before
    for group_id, replaces in (("nowhere", lost.group_id), (ready.group_id, "nowhere")):
        with pytest.raises(UnknownGroup, match="nowhere"):
            await promote(group_id, 2, replaces)

    assert await refused_late(story) == len(refusals)


async def test_place_is_given_to_one_of_two_groups_that_are_promoted_at_once(story: Story) -> None:
    lost = await story.dropped_group(step=2)
    ready = [(await story.sealed_group([1.0], step=3, slot=slot)).group_id for slot in range(4)]

    results = await asyncio.gather(
        *(story.ledger.groups.promote(group_id, 2, lost.group_id) for group_id in ready), return_exceptions=True
    )

    assert sorted(type(result).__name__ for result in results) == ["GroupRecord", *["IllegalTransition"] * 3]
    assert await story.ledger.checks.of(story.run_id) == []


async def test_promoted_group_is_not_promoted_once_more(story: Story) -> None:
    lost = [await story.dropped_group(step=step) for step in (1, 2)]
    ready = await story.sealed_group([1.0], step=4)
    await story.ledger.groups.promote(ready.group_id, 2, lost[1].group_id)

    with pytest.raises(IllegalTransition, match="it has the place of group"):
        await story.ledger.groups.promote(ready.group_id, 1, lost[0].group_id)


async def test_promotion_and_the_batch_of_the_step_at_the_same_time_have_an_order(story: Story) -> None:
    for step in range(0, 12, 2):
        lost = await story.dropped_group(step=step)
        ready = await story.sealed_group([1.0], step=step + 1)

        stored, promoted = await asyncio.gather(
            story.batch([ready.group_id], step=step + 1),
            story.ledger.groups.promote(ready.group_id, step, lost.group_id),
            return_exceptions=True,
        )

        assert isinstance(stored, BatchGroupRefused) != isinstance(promoted, IllegalTransition)
