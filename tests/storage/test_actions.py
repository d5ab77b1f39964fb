"""The audit: every request once, with who and why."""

import asyncio

import pytest

from tests.storage.building import Story, action

pytestmark = pytest.mark.integration


async def test_action_is_kept_with_actor_reason_and_time(story: Story) -> None:
    asked = action(story.run_id)

    stored = await story.ledger.actions.record(asked)

    assert stored.at is not None
    assert stored.model_copy(update={"at": None}) == asked
    assert await story.ledger.actions.list(story.run_id) == [stored]


async def test_same_request_again_is_no_second_action(story: Story) -> None:
    asked = action(story.run_id)

    stored = await asyncio.gather(*(story.ledger.actions.record(asked) for _ in range(4)))
    again = await story.ledger.actions.record(asked.model_copy(update={"outcome": "unchanged"}))

    assert all(one == again for one in stored)
    assert await story.ledger.actions.list(story.run_id) == [again]


async def test_refused_request_is_kept_too_and_targets_are_told_apart(story: Story) -> None:
    first = await story.ledger.actions.record(action(story.run_id, outcome="refused", detail="it is not parked"))
    second = await story.ledger.actions.record(action(story.run_id, target=story.run_id, verb="pause", arguments={}))

    assert await story.ledger.actions.list(story.run_id) == [first, second]
    assert await story.ledger.actions.list(story.run_id, target=story.run_id) == [second]
    assert await story.ledger.actions.list(story.run_id, target="another") == []


@pytest.mark.parametrize("blank", ["actor", "reason", "verb", "target"])
async def test_action_without_a_name_or_a_reason_is_refused(story: Story, blank: str) -> None:
    with pytest.raises(ValueError, match="needs an actor, a reason, a verb and a target"):
        await story.ledger.actions.record(action(story.run_id, **{blank: "  "}))
    assert await story.ledger.actions.list(story.run_id) == []
