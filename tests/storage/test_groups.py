"""Groups: opened once with their rollouts, moved along legal transitions only."""

import asyncio
import itertools
from typing import Any, get_args

import pytest

from storage.errors import GroupConflict, IllegalTransition, StepClosed, UnknownGroup
from storage.groups import LEGAL_FROM
from storage.ledger import Ledger
from storage.records import GroupState
from tests.storage.building import Story, start_run

pytestmark = pytest.mark.integration

STATES: tuple[GroupState, ...] = get_args(GroupState)
LEGAL = {
    ("open", "sealed"),
    ("open", "parked"),
    ("open", "dropped"),
    ("open", "set_aside"),
    ("parked", "open"),
    ("parked", "sealed"),
    ("parked", "dropped"),
    ("parked", "set_aside"),
    ("dropped", "open"),
    ("sealed", "trained"),
}
PATHS: dict[GroupState, tuple[GroupState, ...]] = {
    "open": (),
    "sealed": ("sealed",),
    "parked": ("parked",),
    "dropped": ("dropped",),
    "set_aside": ("set_aside",),
    "trained": ("sealed", "trained"),
}


async def test_group_opens_with_its_rollouts(story: Story) -> None:
    group = await story.group(step=3, slot=5, num_rollouts=3)

    assert group.state == "open"
    assert [rollout.rollout_id for rollout in group.rollouts] == [
        f"{story.run_id}/step-3/group-5/rollout-{index}" for index in range(3)
    ]
    assert {rollout.state for rollout in group.rollouts} == {"open"}
    assert group == await story.ledger.groups.get(group.group_id)


async def test_group_opened_by_many_at_once_is_opened_once(story: Story) -> None:
    groups = await asyncio.gather(*(story.group() for _ in range(8)))

    assert all(group == groups[0] for group in groups)
    assert len(groups[0].rollouts) == 2


async def test_group_opened_again_with_another_prompt_is_refused(story: Story) -> None:
    group = await story.group()

    with pytest.raises(GroupConflict, match=r"prompt_id=prompt-0 .* prompt_id=other"):
        await story.ledger.groups.open(group.group_id, story.run_id, 0, 0, "train", "other", 0, 2)


async def test_slot_belongs_to_one_group(story: Story) -> None:
    await story.group()

    with pytest.raises(GroupConflict, match="slot 0 of step 0"):
        await story.ledger.groups.open(f"{story.run_id}/another", story.run_id, 0, 0, "train", "p", 0, 2)


@pytest.mark.parametrize(("stored", "asked"), list(itertools.product(STATES, STATES)))
async def test_transition_is_legal_or_refused(story: Story, stored: GroupState, asked: GroupState) -> None:
    group = await story.group(num_rollouts=1)
    await story.settle(group.rollouts[0].rollout_id, 1.0)
    for state in PATHS[stored]:
        await story.ledger.groups.set_state(group.group_id, state, reason="the story")
    before = await story.ledger.groups.get(group.group_id)

    if stored == asked:
        assert await story.ledger.groups.set_state(group.group_id, asked, reason="again") == before
    elif (stored, asked) in LEGAL:
        assert (await story.ledger.groups.set_state(group.group_id, asked, reason="legal")).state == asked
    else:
        with pytest.raises(IllegalTransition, match=f"is {stored} and cannot become {asked}"):
            await story.ledger.groups.set_state(group.group_id, asked, reason="illegal")
        assert await story.ledger.groups.get(group.group_id) == before


def test_rules_of_the_code_are_the_rules_of_this_story() -> None:
    assert {(stored, asked) for asked, origins in LEGAL_FROM.items() for stored in origins} == LEGAL


async def test_group_with_an_open_rollout_is_not_sealed(story: Story) -> None:
    group = await story.group(num_rollouts=2)
    await story.settle(group.rollouts[0].rollout_id, 1.0)

    with pytest.raises(IllegalTransition, match="some of its rollouts are open"):
        await story.ledger.groups.set_state(group.group_id, "sealed")

    await story.ledger.rollouts.lose(group.rollouts[1].rollout_id, "lost", "budget used up")
    assert (await story.ledger.groups.set_state(group.group_id, "sealed")).state == "sealed"


@pytest.mark.parametrize("state", ["parked", "dropped"])
async def test_group_given_up_names_the_reason(story: Story, state: GroupState) -> None:
    group = await story.group()

    with pytest.raises(ValueError, match="without a reason"):
        await story.ledger.groups.set_state(group.group_id, state)

    given_up = await story.ledger.groups.set_state(group.group_id, state, "infra", "2 of 2 rollouts lost")
    assert (given_up.state, given_up.bucket, given_up.reason) == (state, "infra", "2 of 2 rollouts lost")


async def test_parked_group_that_opens_again_gives_only_its_lost_rollouts_another_chance(story: Story) -> None:
    group = await story.group(num_rollouts=3)
    kept, lost, masked = (rollout.rollout_id for rollout in group.rollouts)
    await story.settle(kept, 1.0)
    await story.fail(lost)
    await story.ledger.rollouts.lose(lost, "lost", "budget used up")
    await story.ledger.rollouts.lose(masked, "masked", "by the operator")
    await story.ledger.groups.set_state(group.group_id, "parked", "infra", "one lost")

    opened = await story.ledger.groups.set_state(group.group_id, "open")

    assert (opened.reason, opened.bucket) == (None, None)
    assert [rollout.state for rollout in opened.rollouts] == ["valid", "open", "masked"]
    assert [attempt.state for attempt in opened.rollouts[1].attempts] == ["failed"]
    assert await story.begin(lost) == 1


async def test_group_whose_rewards_are_equal_is_set_aside_for_good(story: Story) -> None:
    groups = story.ledger.groups
    aside = await story.set_aside_group(reward=0.25)
    assert (aside.state, aside.bucket, aside.reason, aside.ended_order) == ("set_aside", None, "equal rewards", 1)
    assert await groups.set_state(aside.group_id, "set_aside", reason="again") == aside
    for state in ("open", "parked", "sealed", "dropped", "trained"):
        with pytest.raises(IllegalTransition):
            await groups.set_state(aside.group_id, state, reason="no")
    assert await groups.get(aside.group_id) == aside


async def test_masked_rollouts_do_not_keep_a_group_from_being_set_aside(story: Story) -> None:
    group = await story.group(num_rollouts=3)
    await story.settle(group.rollouts[0].rollout_id, 1.0)
    await story.ledger.rollouts.lose(group.rollouts[1].rollout_id, "masked", "by the operator")
    await story.ledger.groups.set_state(group.group_id, "parked", reason="waits")
    with pytest.raises(IllegalTransition, match="some of its rollouts are open"):
        await story.ledger.groups.set_state(group.group_id, "set_aside", reason="equal")
    await story.settle(group.rollouts[2].rollout_id, 1.0)
    assert (await story.ledger.groups.set_state(group.group_id, "set_aside", reason="equal")).state == "set_aside"


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (0.1 + 0.2, 0.3), ()])
async def test_group_that_carries_a_signal_or_nothing_is_not_set_aside(
    story: Story, rewards: tuple[float, ...]
) -> None:
    group = await story.group(num_rollouts=2)
    for rollout, reward in zip(group.rollouts, rewards, strict=False):
        await story.settle(rollout.rollout_id, reward)
    for rollout in group.rollouts[len(rewards) :]:
        await story.ledger.rollouts.lose(rollout.rollout_id, "masked", "by the operator")
    with pytest.raises(IllegalTransition, match="only when all its valid rollouts have the same reward"):
        await story.ledger.groups.set_state(group.group_id, "set_aside", reason="equal")
    assert (await story.ledger.groups.get(group.group_id)).state == "open"


async def test_evaluations_and_copies_are_not_set_aside(story: Story) -> None:
    evaluation = await story.group(purpose="validation", num_rollouts=1)
    copy = await story.ledger.copies.open((await story.set_aside_group(slot=1)).group_id)
    for group in (evaluation, copy):
        for rollout in group.rollouts:
            await story.settle(rollout.rollout_id, 1.0)
        with pytest.raises(IllegalTransition, match="only a train group is"):
            await story.ledger.groups.set_state(group.group_id, "set_aside", reason="equal")


async def test_group_of_a_closed_step_is_not_set_aside(story: Story) -> None:
    kept = await story.sealed_group([1.0], slot=0)
    late = await story.group(slot=1, num_rollouts=1)
    await story.settle(late.rollouts[0].rollout_id, 1.0)
    await story.batch([kept.group_id])
    with pytest.raises(StepClosed):
        await story.ledger.groups.set_state(late.group_id, "set_aside", reason="equal")
    assert (await story.ledger.summaries.of(story.run_id)).groups.refused_late == 1


async def test_list_narrows_by_step_state_and_purpose(story: Story) -> None:
    await story.group(step=0, slot=1)
    sealed = await story.sealed_group([1.0], step=0, slot=0)
    later = await story.group(step=1)
    evaluation = await story.group(step=0, slot=0, purpose="validation")
    groups = story.ledger.groups

    assert [group.slot for group in await groups.list(story.run_id, step=0, purpose="train")] == [0, 1]
    assert await groups.list(story.run_id, state="sealed") == [sealed]
    assert await groups.list(story.run_id, step=1) == [later]
    assert await groups.list(story.run_id, purpose="validation") == [evaluation]
    assert len(await groups.list(story.run_id)) == 4


async def test_list_narrows_by_states_failure_class_and_last_change(story: Story) -> None:
    failed = await story.group(slot=0)
    await story.fail(failed.rollouts[1].rollout_id)
    await story.ledger.groups.set_state(failed.group_id, "parked", "infra", "waits")
    dropped = await story.dropped_group(slot=1)
    await story.group(slot=2)
    groups = story.ledger.groups

    async def slots(**narrowed: Any) -> list[int]:
        return [group.slot for group in await groups.list(story.run_id, **narrowed)]

    assert await slots(states=["parked", "dropped"]) == [0, 1]
    assert await slots(states=[]) == []
    assert await slots(failure_class="http_500") == [0]
    assert await slots(failure_class="http_503") == []
    assert await slots(since=dropped.updated_at) == [1, 2]
    assert await slots(since=dropped.updated_at, states=["dropped"]) == [1]


async def test_groups_of_another_run_are_not_listed(ledger: Ledger, story: Story) -> None:
    await story.group()
    assert await ledger.groups.list((await start_run(ledger)).run_id) == []


async def test_group_that_replaces_one_is_opened_again_with_the_same_one_only(story: Story) -> None:
    lost = await story.dropped_group(slot=0)
    spare = await story.group(slot=2, replaces=lost.group_id)

    assert await story.group(slot=2, replaces=lost.group_id) == spare
    with pytest.raises(GroupConflict, match=rf"replaces={lost.group_id} and cannot be opened again with replaces=None"):
        await story.group(slot=2)


async def test_place_is_taken_once_and_only_when_its_group_is_dropped(story: Story) -> None:
    lost, kept = await story.dropped_group(slot=0), await story.sealed_group([1.0], slot=1)
    spare = await story.group(slot=2, replaces=lost.group_id)

    with pytest.raises(GroupConflict, match=f"another id for its place .{spare.group_id}"):
        await story.group(slot=3, replaces=lost.group_id)
    with pytest.raises(IllegalTransition, match=r"is sealed .* keeps its place in step 0 until it is dropped"):
        await story.group(slot=3, replaces=kept.group_id)
    with pytest.raises(IllegalTransition, match="it has no place in step 4"):
        await story.group(step=4, slot=3, replaces=spare.group_id)
    with pytest.raises(UnknownGroup, match="nowhere"):
        await story.group(slot=3, replaces="nowhere")
    assert len(await story.ledger.groups.list(story.run_id)) == 3


async def test_group_of_another_run_is_not_replaced(ledger: Ledger, story: Story) -> None:
    other = Story(ledger, (await start_run(ledger)).run_id)
    lost = await other.dropped_group()
    with pytest.raises(UnknownGroup, match=lost.group_id):
        await story.group(slot=3, replaces=lost.group_id)


async def test_group_whose_place_was_taken_is_not_opened_again(story: Story) -> None:
    lost = await story.dropped_group(slot=0)
    await story.group(slot=2, replaces=lost.group_id)

    with pytest.raises(IllegalTransition, match="is dropped and cannot become open: another group has taken its place"):
        await story.ledger.groups.set_state(lost.group_id, "open")
    assert await story.ledger.groups.get(lost.group_id) == lost


async def test_copy_is_opened_by_its_id_only_once_it_was_made(story: Story) -> None:
    original = await story.sealed_group([1.0])
    copy = await story.ledger.copies.open(original.group_id)
    asked = (story.run_id, 0, 0, "diagnostic", "prompt-0", 0)

    assert await story.ledger.groups.open(copy.group_id, *asked, 1) == copy
    with pytest.raises(GroupConflict, match="num_rollouts=1 and cannot be opened again with num_rollouts=2"):
        await story.ledger.groups.open(copy.group_id, *asked, 2)
    with pytest.raises(UnknownGroup, match="replay-7"):
        await story.ledger.groups.open(f"{original.group_id}/replay-7", *asked, 1)


async def test_unknown_group_is_named(ledger: Ledger) -> None:
    with pytest.raises(UnknownGroup, match="nowhere"):
        await ledger.groups.get("nowhere")
    with pytest.raises(UnknownGroup, match="nowhere"):
        await ledger.groups.set_state("nowhere", "sealed")
