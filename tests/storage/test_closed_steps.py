"""Closed steps: after the batch is stored, what comes late is refused, counted, and changes nothing."""

import asyncio

import pytest

from storage.errors import IllegalTransition, StepClosed
from storage.records import GroupRecord, GroupState
from tests.storage.building import Story

pytestmark = pytest.mark.integration


async def refused_late(story: Story) -> int:
    return (await story.ledger.summaries.of(story.run_id)).groups.refused_late


async def late_group(story: Story, state: GroupState) -> GroupRecord:
    """A group in a state, of a step that closed without it."""
    group = await story.group(slot=1, num_rollouts=1)
    await story.settle(group.rollouts[0].rollout_id, 1.0)
    if state != "open":
        await story.ledger.groups.set_state(group.group_id, state, "infra", "the story")
    await story.batch([(await story.sealed_group([1.0])).group_id])
    return await story.ledger.groups.get(group.group_id)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("open", "dropped"),
        ("open", "sealed"),
        ("open", "parked"),
        ("parked", "open"),
        ("parked", "dropped"),
        ("dropped", "open"),
        ("sealed", "trained"),
    ],
)
async def test_late_change_of_a_group_is_refused_and_counted(
    story: Story, stored: GroupState, asked: GroupState
) -> None:
    group = await late_group(story, stored)
    before = await story.ledger.budgets.of(story.run_id)

    for _ in range(2):
        with pytest.raises(StepClosed, match=rf"Step 0 .* is closed: .* which is {stored} and cannot become {asked}"):
            await story.ledger.groups.set_state(group.group_id, asked, "infra", "too late")

    assert await story.ledger.groups.get(group.group_id) == group
    assert await story.ledger.budgets.of(story.run_id) == before
    assert await refused_late(story) == 1


async def test_group_that_came_too_late_to_be_opened_is_not_there(story: Story) -> None:
    lost = await story.dropped_group(slot=3)
    await story.batch([])

    for replaces in (None, lost.group_id):
        with pytest.raises(StepClosed, match=r"not in the ledger and is not opened. Claim its prompt for a later step"):
            await story.group(slot=4 if replaces is None else 5, replaces=replaces)

    assert [group.slot for group in await story.ledger.groups.list(story.run_id)] == [3]
    assert await refused_late(story) == 2


async def test_group_of_the_batch_goes_on(story: Story) -> None:
    group = await story.sealed_group([1.0])
    await story.train([group.group_id])

    assert (await story.group(num_rollouts=1)).state == "trained"
    assert (await story.ledger.groups.set_state(group.group_id, "trained")).state == "trained"
    with pytest.raises(IllegalTransition, match="is trained and cannot become dropped"):
        await story.ledger.groups.set_state(group.group_id, "dropped", None, "too late")
    assert await refused_late(story) == 0


async def test_what_is_so_already_is_no_late_change(story: Story) -> None:
    group = await late_group(story, "dropped")

    assert await story.ledger.groups.set_state(group.group_id, "dropped", "data", "again") == group
    assert await story.group(slot=1, num_rollouts=1) == group
    assert await refused_late(story) == 0


async def test_evaluations_and_copies_know_no_closed_step(story: Story) -> None:
    original = await late_group(story, "dropped")
    copy = await story.ledger.copies.open(original.group_id)
    evaluation = await story.group(purpose="validation", num_rollouts=1)

    for group in (copy, evaluation):
        await story.settle(group.rollouts[0].rollout_id, 1.0)
        assert (await story.ledger.groups.set_state(group.group_id, "sealed")).state == "sealed"
    assert await refused_late(story) == 0


async def test_batch_and_the_end_of_a_group_at_the_same_time_have_an_order(story: Story) -> None:
    for step in range(6):
        sealed = await story.sealed_group([1.0], step=step)
        group = await story.group(step=step, slot=1)

        _, dropped = await asyncio.gather(
            story.batch([sealed.group_id], step=step),
            story.ledger.groups.set_state(group.group_id, "dropped", "infra", "no valid rollout"),
            return_exceptions=True,
        )

        stored = await story.ledger.groups.get(group.group_id)
        assert stored.state == ("open" if isinstance(dropped, StepClosed) else "dropped")
    assert (await story.ledger.summaries.of(story.run_id)).identity_holds
