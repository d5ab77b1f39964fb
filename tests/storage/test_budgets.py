"""Drop counters: golden sequences of endings, what gives a drop back, and endings at the same time."""

import asyncio

import pytest

from configs.storage import StorageConfig
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import UnknownGroup
from storage.ledger import Ledger
from storage.records import BudgetCounts
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def counters_after(story: Story, endings: str) -> list[BudgetCounts]:
    """End one group after another: i(nfra drop), d(ata drop), o(perator's drop), k(ept), s(et aside). The counters
    after each."""
    after: list[BudgetCounts] = []
    for slot, ending in enumerate(endings):
        if ending == "k":
            group = await story.sealed_group([1.0], slot=slot)
        elif ending == "s":
            group = await story.set_aside_group(slot=slot)
        else:
            bucket = {"i": "infra", "d": "data", "o": None}[ending]
            group = await story.dropped_group(slot=slot, bucket=bucket)
        after.append(await story.ledger.budgets.after(group.group_id))
    return after


@pytest.mark.parametrize(
    ("endings", "consecutive", "skipped"),
    [
        ("iikiii", [1, 2, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0]),  # with a budget of 2 the last one ends the run
        ("idi", [1, 1, 2], [0, 1, 1]),  # a data drop between leaves the counter
        ("dkdkd", [0, 0, 0, 0, 0], [1, 1, 2, 2, 3]),  # with a budget of 2 the third ends the run; it never resets
        ("ioik", [1, 1, 2, 0], [0, 0, 0, 0]),  # an operator's drop touches no budget
        ("okd", [0, 0, 0], [0, 0, 1]),
        ("iisis", [1, 2, 0, 1, 0], [0, 0, 0, 0, 0]),  # what was set aside came through the infrastructure
        ("dsd", [0, 0, 0], [1, 1, 2]),  # and costs nothing itself
    ],
)
async def test_counters_follow_the_order_of_endings(
    story: Story, endings: str, consecutive: list[int], skipped: list[int]
) -> None:
    after = await counters_after(story, endings)

    assert [counts.consecutive_drops for counts in after] == consecutive
    assert [counts.skipped_prompts for counts in after] == skipped
    assert await story.ledger.budgets.of(story.run_id) == after[-1]


async def test_counters_of_an_earlier_ending_do_not_change_with_later_ones(story: Story) -> None:
    after = await counters_after(story, "iidkid")

    later = [await story.ledger.budgets.after(story.group_id(0, slot)) for slot in range(6)]

    assert later == after


async def test_commits_of_one_step_reset_what_drops_of_another_one_cost(story: Story) -> None:
    counts: list[int] = []
    for slot in range(3):
        await story.dropped_group(step=3, slot=slot)
        counts.append((await story.ledger.budgets.of(story.run_id)).consecutive_drops)
        await story.sealed_group([1.0], step=4, slot=slot)
        counts.append((await story.ledger.budgets.of(story.run_id)).consecutive_drops)

    assert counts == [1, 0, 1, 0, 1, 0]  # only the floor of step 3 stops it from shrinking


async def test_group_that_is_opened_again_gives_back_what_it_had_cost(story: Story) -> None:
    await counters_after(story, "iid")
    groups, budgets = story.ledger.groups, story.ledger.budgets

    opened = await groups.set_state(story.group_id(0, 1), "open")
    assert opened.ended_order is None
    assert await budgets.of(story.run_id) == BudgetCounts(consecutive_drops=1, skipped_prompts=1)

    await groups.set_state(story.group_id(0, 2), "open")
    assert await budgets.of(story.run_id) == BudgetCounts(consecutive_drops=1, skipped_prompts=0)

    await groups.set_state(opened.group_id, "dropped", "infra", "again")
    assert await budgets.of(story.run_id) == BudgetCounts(consecutive_drops=2, skipped_prompts=0)


async def test_kept_group_that_ended_earlier_does_not_reset_a_later_drop(story: Story) -> None:
    await counters_after(story, "ki")
    await story.train([story.group_id(0, 0)])

    trained = await story.ledger.groups.get(story.group_id(0, 0))

    assert trained.ended_order == 1
    assert (await story.ledger.budgets.of(story.run_id)).consecutive_drops == 1


async def test_parked_group_costs_nothing_until_it_is_dropped(story: Story) -> None:
    await counters_after(story, "i")
    parked = await story.group(slot=1)
    await story.ledger.groups.set_state(parked.group_id, "parked", "infra", "waits")
    assert (await story.ledger.budgets.after(parked.group_id)).consecutive_drops == 1

    await story.ledger.groups.set_state(parked.group_id, "dropped", "infra", "its time is over")
    assert (await story.ledger.budgets.after(parked.group_id)).consecutive_drops == 2


async def test_evaluations_and_copies_touch_no_budget_and_have_no_order(story: Story) -> None:
    await counters_after(story, "i")
    evaluation = await story.group(purpose="validation", num_rollouts=1)
    copy = await story.ledger.copies.open(story.group_id(0, 0))
    for group in (evaluation, copy):
        await story.ledger.rollouts.lose(group.rollouts[0].rollout_id, "lost", "budget used up")
        for state in ("dropped", "open"):
            moved = await story.ledger.groups.set_state(group.group_id, state, "infra", "again")
            assert moved.ended_order is None
        await story.settle(group.rollouts[0].rollout_id, 1.0)
        assert (await story.ledger.groups.set_state(group.group_id, "sealed")).ended_order is None
        assert (await story.ledger.budgets.after(group.group_id)).consecutive_drops == 1
    assert await story.ledger.checks.of(story.run_id) == []


async def test_groups_that_end_at_the_same_time_have_an_order_and_counters_of_their_own(
    story: Story, storage_config: StorageConfig, blobs: BlobStore
) -> None:
    groups = [await story.group(slot=slot, num_rollouts=1) for slot in range(8)]
    for group in groups:
        await story.ledger.rollouts.lose(group.rollouts[0].rollout_id, "lost", "budget used up")
    elsewhere = Database(storage_config)
    ledgers = [story.ledger, Ledger(elsewhere, blobs)]

    async def drop(number: int) -> tuple[int | None, int]:
        ledger, group_id = ledgers[number % 2], groups[number].group_id
        dropped = await ledger.groups.set_state(group_id, "dropped", "infra", "no valid rollout")
        return dropped.ended_order, (await ledger.budgets.after(group_id)).consecutive_drops

    ended = await asyncio.gather(*map(drop, range(8)))
    await elsewhere.close()

    assert sorted(ended) == [(place, place) for place in range(1, 9)]


async def test_counters_of_an_unknown_group_are_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownGroup, match="nowhere"):
        await ledger.budgets.after("nowhere")
