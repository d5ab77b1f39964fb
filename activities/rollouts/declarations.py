"""What the compaction agent declares about its model calls, checked against itself before anybody relies on it.

Rules and names: NeMo-Gym's `model_call_metadata` and `boundary_events`, as NeMo-RL's trace builder reads them. An agent
that declares nothing is fine; one whose declarations contradict each other is an IntegrityError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.errors import IntegrityError, one_line

_UNNAMED = "declared by the agent"


@dataclass(frozen=True)
class Declaration:
    """One call. `segment` counts from 0; `boundary` is the reason at the first call of a later segment, else None."""

    segment: int
    boundary: str | None
    finish_reason: str | None
    request_id: str | None


class _Foreign(BaseModel):
    """What another program wrote: no coercion, other fields are not ours."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Span(_Foreign):
    start: int
    end: int


class _Call(_Foreign):
    rollout_id: str
    turn_id: int
    segment_index: int
    context_epoch: int | None = None
    expected_append_compatible: bool | None = None
    compaction_event_id: str | None = None
    completion_id: str | None = None
    action_id: str | None = None
    request_id: str | None = None
    finish_reason: str | None = None
    generation_contract_id: str | None = None
    policy_output_spans: list[_Span] | None = None
    media_ids: list[str] = Field(default_factory=list)
    eligible: bool = True


class _Boundary(_Foreign):
    event_id: str
    applies_to_step: int
    reason: str


class _Declared(_Foreign):
    """The part of a response that declares. `boundary_events` is None where the agent sends none at all."""

    model_call_metadata: list[_Call] | None = None
    boundary_events: list[_Boundary] | None = None


def declarations(response: dict[str, Any], sampled: Sequence[int], rollout_id: str) -> list[Declaration | None]:
    """One declaration for each call with tokens, None for each where the agent declares nothing.

    `sampled`: the number of sampled tokens of each call. `rollout_id`: as NeMo-Gym was given it.

    Raises:
        IntegrityError: declarations that contradict each other, the calls, or the request.
    """
    try:
        declared = _Declared.model_validate(response)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise IntegrityError(f"the agent's declarations are malformed: {where}: {first['msg']}") from error
    calls = declared.model_call_metadata
    if calls is None:
        return [None] * len(sampled)
    if len(calls) != len(sampled):
        raise IntegrityError(f"model_call_metadata has {len(calls)} entries for {len(sampled)} calls with tokens")
    for turn, (call, tokens) in enumerate(zip(calls, sampled, strict=True), start=1):
        _check_call(turn, call, tokens, rollout_id)
    _check_across_calls(calls)
    boundaries = _boundaries(calls, declared.boundary_events)
    return [
        Declaration(
            segment=call.segment_index,
            boundary=boundaries.get(turn),
            finish_reason=_text(call.finish_reason),
            request_id=_text(call.request_id),
        )
        for turn, call in enumerate(calls, start=1)
    ]


def _check_call(turn: int, call: _Call, sampled: int, rollout_id: str) -> None:
    if call.rollout_id != rollout_id:
        raise IntegrityError(f"turn {turn} is of rollout {call.rollout_id!r}, asked was {rollout_id!r}")
    if call.turn_id != turn:
        raise IntegrityError(f"turn {turn} says that it is turn {call.turn_id}: turns are 1, 2, 3, ...")
    if call.context_epoch not in (None, call.segment_index):
        raise IntegrityError(f"turn {turn}: context_epoch is {call.context_epoch} in segment {call.segment_index}")
    if not call.eligible:
        raise IntegrityError(f"turn {turn} is declared not eligible for training, which a row cannot express")
    if call.media_ids:
        raise IntegrityError(f"turn {turn} carries images, which a row cannot hold: train on text only")
    spans = call.policy_output_spans
    if spans is not None and [(span.start, span.end) for span in spans] != [(0, sampled)]:
        raise IntegrityError(f"turn {turn}: policy_output_spans is not one span over its {sampled} sampled tokens")


def _check_across_calls(calls: Sequence[_Call]) -> None:
    for key in ("completion_id", "action_id"):
        ids = [value for call in calls if (value := getattr(call, key)) is not None]
        if len(set(ids)) != len(ids):
            raise IntegrityError(f"model_call_metadata gives two calls the same {key}")
    if len({call.generation_contract_id for call in calls}) > 1:
        raise IntegrityError("the calls of one rollout have different generation contracts")


def _boundaries(calls: Sequence[_Call], events: Sequence[_Boundary] | None) -> dict[int, str]:
    """The reason of each boundary, by the turn after it."""
    unused = None if events is None else {event.applies_to_step: event for event in events}
    if unused is not None and events is not None and len(unused) != len(events):
        raise IntegrityError("boundary_events has two boundaries for one turn")
    boundaries: dict[int, str] = {}
    before: int | None = None
    for turn, call in enumerate(calls, start=1):
        if call.segment_index not in ((0,) if before is None else (before, before + 1)):
            raise IntegrityError(f"turn {turn} is in segment {call.segment_index}, after segment {before}")
        starts = before is None or call.segment_index != before
        if call.expected_append_compatible not in (None, not starts):
            place = "at the start of a segment" if starts else "inside a segment"
            raise IntegrityError(
                f"turn {turn} declares expected_append_compatible {call.expected_append_compatible} {place}"
            )
        event = unused.pop(turn, None) if unused is not None and starts and before is not None else None
        if call.compaction_event_id != (event and event.event_id):
            raise IntegrityError(
                f"turn {turn} names boundary {call.compaction_event_id!r}, recorded is {event and event.event_id!r}"
            )
        if starts and before is not None:
            if unused is not None and event is None:
                raise IntegrityError(f"Material rewrite before turn {turn} has no boundary record")
            boundaries[turn] = _UNNAMED if event is None else _text(event.reason) or _UNNAMED
        before = call.segment_index
    if unused:
        raise IntegrityError(f"Boundary for turn {min(unused)} is unused: no model call begins a segment there")
    return boundaries


def _text(value: str | None) -> str | None:
    return one_line(value) or None if value else None
