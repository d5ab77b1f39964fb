"""Transcripts: every event of an attempt once, in order, with what became of it."""

import pytest

from storage.errors import UnknownAttempt, UnknownRollout
from storage.records import SelectedResponse
from tests.storage.building import Story, selecting

pytestmark = pytest.mark.integration

SAID = b'{"id": "chatcmpl-1", "choices": [{"message": {"role": "assistant", "content": "up"}}]}'


async def test_the_attempt_that_died_and_the_one_that_finished_tell_the_whole_story(story: Story) -> None:
    rollout = await story.open_rollout()
    calls = story.ledger.calls
    await story.begin(rollout)
    first = await story.generate(rollout, 0, body=SAID)
    failing = await calls.claim(rollout, 0, "refused")
    await calls.fail(failing, "GenerationUnavailable", "HTTP 500")
    await calls.claim(rollout, 0, "hangs")
    await story.ledger.rollouts.fail_attempt(rollout, 0, "agent", "infra", "AgentUnavailable", "gone")
    await story.begin(rollout)
    assert (await calls.claim(rollout, 1, "request")).recorded is not None
    await calls.measure(rollout, 1, 7)
    await story.generate(rollout, 1, (1, 2, 3, 4, 5, 6, 7), (8,), first, "next")
    new = {"continuity": "new_segment", "continuity_reason": "unknown_parent"}
    await story.generate(rollout, 1, (1, 9), (10, 11), None, "third", **new)
    settlement = selecting(rollout, 1, (0, 2, 3)).model_copy(
        update={
            "segments": 2,
            "selected": (
                SelectedResponse(ordinal=0, segment=0, boundary=None),
                SelectedResponse(ordinal=2, segment=0, boundary=None),
                SelectedResponse(ordinal=3, segment=1, boundary="unknown_parent"),
            ),
        }
    )
    await story.ledger.rollouts.settle(settlement)

    died = await story.ledger.transcripts.of(rollout, 0)
    assert [(turn.outcome, turn.selected) for turn in died.turns] == [
        ("generated", False),
        ("failed", False),
        ("abandoned", False),
    ]
    assert died.turns[0].message == {"role": "assistant", "content": "up"}
    assert died.turns[1].failure == "GenerationUnavailable: HTTP 500"

    finished = await story.ledger.transcripts.of(rollout)
    assert finished.attempt.attempt == 1
    assert [(turn.ordinal, turn.outcome, turn.segment, turn.boundary) for turn in finished.turns] == [
        (0, "replayed", 0, None),
        (1, "measured", None, None),
        (2, "generated", 0, None),
        (3, "generated", 1, "unknown_parent"),
    ]
    assert finished.turns[0].replayed_from == 0
    assert [turn.new_token_ids for turn in finished.turns] == [(1, 2, 3), (), (6, 7), (1, 9)]
    assert finished.turns[2].versions == ("policy-0",)


async def test_a_call_of_a_running_attempt_that_has_no_answer_yet_is_in_flight(story: Story) -> None:
    rollout = await story.open_rollout()
    await story.begin(rollout)
    await story.ledger.calls.claim(rollout, 0, "request")
    (turn,) = (await story.ledger.transcripts.of(rollout)).turns
    assert (turn.outcome, turn.seconds) == ("in_flight", None)


async def test_what_is_not_there_is_named(story: Story) -> None:
    rollout = await story.open_rollout()
    with pytest.raises(UnknownRollout, match="nobody"):
        await story.ledger.transcripts.of("nobody/step-0/group-0/rollout-0")
    with pytest.raises(UnknownAttempt, match="attempt 0"):
        await story.ledger.transcripts.of(rollout)
    await story.begin(rollout)
    with pytest.raises(UnknownAttempt, match="attempt 3"):
        await story.ledger.transcripts.of(rollout, 3)
