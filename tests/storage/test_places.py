"""Places of a step: the walk from a slot's own group to the one that stands for it, as a run that resumes needs it."""

import pytest

from storage.ledger import Ledger
from storage.records import BudgetCounts
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def standing(story: Story, step: int, count: int) -> list[tuple[str | None, int]]:
    """Which group stands for each slot, and the replacements that led to it."""
    places = await story.ledger.places.of(story.run_id, step, count)
    assert [place.slot for place in places] == list(range(count))
    return [(None if place.group is None else place.group.group_id, place.used) for place in places]


async def test_slot_is_its_own_group_or_nobodys_yet(story: Story) -> None:
    sealed = await story.sealed_group([1.0], step=2, slot=0)
    opened = await story.group(step=2, slot=2)
    await story.group(step=1, slot=1)
    await story.group(step=2, slot=1, purpose="validation")

    assert await standing(story, 2, 3) == [(sealed.group_id, 0), (None, 0), (opened.group_id, 0)]
    places = await story.ledger.places.of(story.run_id, 2, 1)
    assert places[0].group == sealed


async def test_dropped_group_that_nobody_replaced_stands_for_its_slot(story: Story) -> None:
    lost = await story.dropped_group()
    assert await standing(story, 0, 1) == [(lost.group_id, 0)]


async def test_replacements_are_followed_and_counted(story: Story) -> None:
    lost = await story.dropped_group(slot=0)
    first = await story.dropped_group(slot=2, replaces=lost.group_id)
    second = await story.group(slot=3, replaces=first.group_id)
    other = await story.sealed_group([1.0], slot=1)

    assert await standing(story, 0, 2) == [(second.group_id, 2), (other.group_id, 0)]


async def test_group_that_was_set_aside_is_followed_to_its_refill_which_is_no_replacement(story: Story) -> None:
    aside = await story.set_aside_group(slot=0)
    assert await standing(story, 0, 1) == [(aside.group_id, 0)]
    again = await story.set_aside_group(slot=1, reward=0.0, replaces=aside.group_id)
    lost = await story.dropped_group(slot=2, replaces=again.group_id)
    third = await story.set_aside_group(slot=3, replaces=lost.group_id)
    assert await standing(story, 0, 1) == [(third.group_id, 1)]
    kept = await story.sealed_group([1.0, 0.0], slot=4, replaces=third.group_id)

    assert await standing(story, 0, 1) == [(kept.group_id, 1)]
    found = await story.ledger.places.set_aside(story.run_id, 0)
    assert [(group.group_id, group.reward) for group in found] == [
        (aside.group_id, 1.0),
        (again.group_id, 0.0),
        (third.group_id, 1.0),
    ]
    assert await story.ledger.places.set_aside(story.run_id, 1) == []
    await story.train([kept.group_id])
    summary = await story.ledger.summaries.of(story.run_id)
    assert (summary.groups.set_aside, summary.groups.replaced, summary.groups.dropped) == (3, 1, 1)
    assert summary.identity_holds
    assert await story.ledger.checks.of(story.run_id) == []


async def test_spare_of_a_lent_place_that_is_set_aside_is_followed_in_the_later_step(story: Story) -> None:
    aside = await story.set_aside_group(step=5, slot=0)
    lost = await story.dropped_group(step=5, slot=1, replaces=aside.group_id)
    ready = await story.sealed_group([1.0, 0.0], step=6)
    await story.ledger.groups.promote(ready.group_id, 5, lost.group_id)
    spare = await story.set_aside_group(step=6, slot=1, replaces=ready.group_id)
    refill = await story.sealed_group([1.0, 0.0], step=6, slot=2, replaces=spare.group_id)

    assert await standing(story, 5, 1) == [(ready.group_id, 0)]
    assert await standing(story, 6, 1) == [(refill.group_id, 1)]
    assert [group.group_id for group in await story.ledger.places.set_aside(story.run_id, 6)] == [spare.group_id]
    assert await story.ledger.checks.of(story.run_id) == []


async def test_three_of_four_restored_groups_leave_one_prompt_to_run_and_it_is_the_same_prompt(
    story: Story,
) -> None:
    def pick(position: int) -> tuple[int, str]:
        return position, f"prompt-{position}"

    claimed = await story.ledger.prompts.claim(story.run_id, 10, "train", 0, 4, pick)
    restored = [(await story.sealed_group([1.0], step=10, slot=slot)).group_id for slot in (0, 1, 3)]

    again = await story.ledger.prompts.claim(story.run_id, 10, "train", 0, 4, lambda position: (99, "another"))

    assert again == claimed
    assert [group for group, _ in await standing(story, 10, 4)] == [restored[0], restored[1], None, restored[2]]
    assert await story.ledger.prompts.next_slot(story.run_id, 10) == 4


async def test_borrowed_group_stands_in_the_earlier_step_and_its_spare_in_the_later_one(story: Story) -> None:
    lost = await story.dropped_group(step=5, slot=1)
    kept = await story.sealed_group([1.0], step=5, slot=0)
    ready = [await story.sealed_group([1.0], step=step, slot=0) for step in (6, 7)]
    counts = await story.ledger.budgets.of(story.run_id)

    await story.ledger.groups.promote(ready[1].group_id, 5, lost.group_id)
    spare = await story.dropped_group(step=7, slot=1, replaces=ready[1].group_id)

    assert await standing(story, 5, 2) == [(kept.group_id, 0), (ready[1].group_id, 0)]
    assert await standing(story, 6, 1) == [(ready[0].group_id, 0)]
    assert await standing(story, 7, 1) == [(spare.group_id, 1)]  # the slot moved: step 7 is short of a group now
    summary = await story.ledger.summaries.of(story.run_id)
    assert (summary.groups.promoted, summary.groups.replaced) == (1, 1)
    assert counts == BudgetCounts(consecutive_drops=0, skipped_prompts=0)
    await story.train([kept.group_id, ready[1].group_id], step=5)
    assert (await story.ledger.summaries.of(story.run_id)).identity_holds
    assert await story.ledger.checks.of(story.run_id) == []


async def test_lent_group_that_was_not_repaid_is_what_the_later_step_finds(story: Story) -> None:
    lost = await story.dropped_group(step=5)
    spare = await story.dropped_group(step=5, slot=1, replaces=lost.group_id)
    ready = await story.sealed_group([1.0], step=6)

    promoted = await story.ledger.groups.promote(ready.group_id, 5, spare.group_id)

    # Replacements that the borrower had used in this place move to the lender with the loss.
    assert await standing(story, 6, 1) == [(ready.group_id, 1)]
    assert promoted.train_step == 5
    await story.train([ready.group_id], step=5)
    repaid = await story.group(step=6, slot=1, replaces=ready.group_id)
    assert await standing(story, 6, 1) == [(repaid.group_id, 2)]
    assert await standing(story, 5, 1) == [(ready.group_id, 1)]


async def test_copies_stand_for_no_slot(ledger: Ledger, story: Story) -> None:
    dropped = await story.dropped_group()
    await ledger.copies.open(dropped.group_id)
    assert await standing(story, 0, 1) == [(dropped.group_id, 0)]
