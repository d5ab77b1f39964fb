"""The compaction agent's declarations hold together, or the rollout is an error and never trains."""

import copy
from typing import Any

import pytest

from activities.errors import IntegrityError
from activities.rollouts.declarations import declarations

ROLLOUT = "climb.step-3.group-1.rollout-2"
SAMPLED = (2, 1, 1, 1)


def entry(turn: int, segment: int, *, starts: bool = False) -> dict[str, Any]:
    return {
        "rollout_id": ROLLOUT,
        "turn_id": turn,
        "request_id": f"request-{turn}",
        "completion_id": f"completion-{turn:06d}",
        "action_id": f"action-{turn:06d}",
        "context_epoch": segment,
        "segment_index": segment,
        "expected_append_compatible": not starts,
        "compaction_event_id": f"boundary-{turn:06d}" if starts and turn > 1 else None,
        "generation_contract_id": "contract",
        "policy_output_spans": [{"start": 0, "end": SAMPLED[turn - 1], "eligible": True}],
        "media_ids": [],
        "eligible": True,
    }


def boundary(turn: int) -> dict[str, Any]:
    return {"event_id": f"boundary-{turn:06d}", "applies_to_step": turn, "reason": "history_policy_rewrite"}


def response() -> dict[str, Any]:
    """Two turns, a boundary, two turns."""
    return {
        "output": [],
        "model_call_metadata": [
            entry(1, 0, starts=True),
            entry(2, 0),
            entry(3, 1, starts=True),
            entry(4, 1),
        ],
        "boundary_events": [boundary(3)],
    }


def test_segments_and_the_reason_of_their_boundary_are_read() -> None:
    declared = declarations(response(), SAMPLED, ROLLOUT)
    assert [made and (made.segment, made.boundary) for made in declared] == [
        (0, None),
        (0, None),
        (1, "history_policy_rewrite"),
        (1, None),
    ]
    assert declared[3] is not None
    assert declared[3].request_id == "request-4"


def test_agent_that_declares_nothing_declares_nothing() -> None:
    assert declarations({"output": []}, SAMPLED, ROLLOUT) == [None] * 4


def test_boundary_of_an_agent_that_sends_no_records_is_taken_at_its_word() -> None:
    made = response()
    del made["boundary_events"]
    made["model_call_metadata"][2]["compaction_event_id"] = None
    third = declarations(made, SAMPLED, ROLLOUT)[2]
    assert third is not None
    assert third.boundary == "declared by the agent"


CONTRADICTIONS: dict[str, tuple[int, dict[str, Any], str]] = {
    "another rollout": (1, {"rollout_id": "climb.step-3.group-1.rollout-0"}, "turn 2 is of rollout 'climb"),
    "no rollout": (1, {"rollout_id": None}, "malformed: model_call_metadata.1.rollout_id"),
    "turn given twice": (2, {"turn_id": 2}, "turn 3 says that it is turn 2"),
    "turn left out": (3, {"turn_id": 5}, "turn 4 says that it is turn 5"),
    "completion id given twice": (3, {"completion_id": "completion-000001"}, "two calls the same completion_id"),
    "action id given twice": (3, {"action_id": "action-000001"}, "two calls the same action_id"),
    "segment left out": (2, {"segment_index": 2, "context_epoch": 2}, "turn 3 is in segment 2, after segment 0"),
    "segment goes back": (3, {"segment_index": 0, "context_epoch": 0}, "turn 4 is in segment 0, after segment 1"),
    "first segment is not 0": (0, {"segment_index": 1, "context_epoch": 1}, "turn 1 is in segment 1, after segment No"),
    "segment is text": (0, {"segment_index": "0"}, "segment_index"),
    "epoch is another": (1, {"context_epoch": 1}, "turn 2: context_epoch is 1 in segment 0"),
    "start of a segment appends": (2, {"expected_append_compatible": True}, "True at the start of a segment"),
    "turn inside a segment does not": (3, {"expected_append_compatible": False}, "False inside a segment"),
    "boundary named is another": (2, {"compaction_event_id": "boundary-000009"}, "names boundary 'boundary-000009'"),
    "boundary is not named": (2, {"compaction_event_id": None}, "recorded is 'boundary-000003'"),
    "boundary named inside a segment": (1, {"compaction_event_id": "boundary-000003"}, "turn 2 names boundary"),
    "generation contract changes": (3, {"generation_contract_id": "other"}, "different generation contracts"),
    "output span is short": (0, {"policy_output_spans": [{"start": 0, "end": 1}]}, "over its 2 sampled tokens"),
    "output span starts late": (0, {"policy_output_spans": [{"start": 1, "end": 2}]}, "over its 2 sampled tokens"),
    "two output spans": (0, {"policy_output_spans": [{"start": 0, "end": 1}, {"start": 1, "end": 2}]}, "one span"),
    "images": (1, {"media_ids": ["i0"]}, "turn 2 carries images"),
    "not eligible": (1, {"eligible": False}, "turn 2 is declared not eligible"),
}


@pytest.mark.parametrize(("place", "change", "message"), CONTRADICTIONS.values(), ids=list(CONTRADICTIONS))
def test_contradiction_is_an_error(place: int, change: dict[str, Any], message: str) -> None:
    made = copy.deepcopy(response())
    made["model_call_metadata"][place] |= change
    with pytest.raises(IntegrityError, match=message):
        declarations(made, SAMPLED, ROLLOUT)


def test_segment_without_a_boundary_record_is_an_error() -> None:
    made = response() | {"boundary_events": []}
    made["model_call_metadata"][2]["compaction_event_id"] = None
    with pytest.raises(IntegrityError, match="Material rewrite before turn 3 has no boundary record"):
        declarations(made, SAMPLED, ROLLOUT)


def test_boundary_record_that_no_segment_uses_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="Boundary for turn 4 is unused"):
        declarations(response() | {"boundary_events": [boundary(3), boundary(4)]}, SAMPLED, ROLLOUT)


def test_two_boundaries_for_one_turn_are_an_error() -> None:
    with pytest.raises(IntegrityError, match="two boundaries for one turn"):
        declarations(response() | {"boundary_events": [boundary(3), boundary(3)]}, SAMPLED, ROLLOUT)


@pytest.mark.parametrize("metadata", [[], [{}] * 3, {}, [None] * 4, "text"], ids=repr)
def test_metadata_that_does_not_match_the_calls_is_an_error(metadata: Any) -> None:
    with pytest.raises(IntegrityError, match="model_call_metadata"):
        declarations({"model_call_metadata": metadata}, SAMPLED, ROLLOUT)
