"""Which recorded responses a rollout went through: said by the answer, declared, led to by links, or nobody's."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import IntegrityError
from activities.rollouts.answer import Answer, parse
from activities.rollouts.selection import Selection, select
from storage.capture_ids import capture_id
from storage.records import AttemptCall
from tests.rollouts.building import answer, item, recorded, request

GYM_ID = capture_id(request().rollout_id)


def said(*calls: tuple[Sequence[int], Sequence[int]], **fields: str) -> Answer:
    """The answer of an agent that reports these calls."""
    return parse(answer(*(item(list(prompt), list(sampled)) for prompt, sampled in calls), **fields), GYM_ID)


def silent(response_id: str | None = None, terminal_id: str | None = None) -> Answer:
    """The answer of an agent that reports no tokens."""
    made = answer(terminal_logical_request_id=terminal_id)
    made["response"]["id"] = response_id
    return parse(made, GYM_ID)


def ordinals(selection: Selection) -> list[int]:
    assert selection.unselected is None
    return [call.ordinal for call in selection.calls]


def reason(selection: Selection) -> str:
    assert selection.calls == ()
    assert selection.unselected is not None
    return selection.unselected


A = recorded(0)
B = recorded(1, parent=0)
C = recorded(2, parent=0)
D = recorded(3, parent=1)


def test_two_childless_branches_are_ambiguous() -> None:
    assert reason(select(silent(), [A, B, C])) == "ambiguous_terminal: calls 1, 2 all continue call 0"


def test_branch_that_was_continued_beats_its_childless_sibling() -> None:
    assert ordinals(select(silent(), [A, B, C, D])) == [0, 1, 3]


def test_root_that_was_continued_beats_an_earlier_childless_one() -> None:
    assert ordinals(select(silent(), [recorded(0), recorded(1), recorded(2, parent=1)])) == [1, 2]


def test_earliest_of_the_continued_roots_is_the_rollouts() -> None:
    calls = [recorded(0), recorded(1), recorded(2, parent=1), recorded(3, parent=0)]
    assert ordinals(select(silent(), calls)) == [0, 3]


def test_several_first_calls_that_nothing_continues_are_ambiguous() -> None:
    assert reason(select(silent(), [recorded(0), recorded(1)])).startswith("ambiguous_terminal: calls 0, 1 begin")


@pytest.mark.parametrize("named", [{"response_id": "chatcmpl-2"}, {"terminal_id": "chatcmpl-2"}], ids=str)
def test_declared_response_counts_over_the_parent_links(named: dict[str, str]) -> None:
    assert ordinals(select(silent(**named), [A, B, C, D])) == [0, 2]


def test_explicit_declaration_counts_over_the_id_of_the_answer() -> None:
    assert ordinals(select(silent("chatcmpl-3", "chatcmpl-2"), [A, B, C, D])) == [0, 2]


def test_declared_response_that_is_not_recorded_masks_and_never_falls_back() -> None:
    selection = select(silent("chatcmpl-3", "chatcmpl-9"), [A, B, C, D])
    assert reason(selection) == "missing_terminal_row: no response chatcmpl-9 is recorded"


def test_answer_with_an_id_of_the_agents_own_declares_nothing() -> None:
    assert ordinals(select(silent("resp_made_up"), [A, B, C, D])) == [0, 1, 3]


def test_failed_call_is_no_branch_and_spoils_nothing() -> None:
    """NeMo-RL's `request_finished_without_staged_coordinates`: a call without a response is not of the chain."""
    responses = [A, recorded(2, parent=0)]  # call 1 failed, and has no response
    assert ordinals(select(silent("chatcmpl-2"), responses)) == [0, 2]
    assert ordinals(select(silent(), responses)) == [0, 2]


def test_segment_whose_beginning_is_not_recorded_makes_the_chain_ambiguous() -> None:
    calls = [A, B, recorded(2, continuity="new_segment"), recorded(3, parent=2)]
    assert reason(select(silent(), calls)) == "ambiguous_terminal: whether call 2 is of the rollout is not recorded"


def test_segment_that_names_the_call_before_it_is_of_the_chain() -> None:
    calls = [A, B, recorded(2, parent=1, continuity="new_segment"), recorded(3, parent=2)]
    assert ordinals(select(silent(), calls)) == [0, 1, 2, 3]


def test_first_call_may_continue_turns_of_the_dataset() -> None:
    assert ordinals(select(silent(), [recorded(0, continuity="new_segment"), B])) == [0, 1]


def test_replayed_responses_are_linked_where_they_were_generated() -> None:
    calls = [recorded(0, replayed_from=0, attempt=1), recorded(1, parent=0, replayed_from=0, attempt=1)]
    assert ordinals(select(silent(), calls)) == [0, 1]


def test_parent_that_the_attempt_never_asked_for_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="call 3 continues call 1 of attempt 0, which this attempt never"):
        select(silent(), [A, D])


def test_reported_calls_are_found_by_their_tokens_and_the_rest_is_dead() -> None:
    responses = [recorded(0, [1], [2]), recorded(1, [1], [3]), recorded(2, [1, 3, 4], [5])]
    assert ordinals(select(said(([1], [3]), ([1, 3, 4], [5])), responses)) == [1, 2]


def test_equal_tokens_of_two_calls_are_two_responses() -> None:
    responses = [recorded(0, [1], [2]), recorded(1, [1], [2])]
    assert ordinals(select(said(([1], [2]), ([1], [2])), responses)) == [0, 1]


def test_calls_that_ran_side_by_side_keep_the_order_of_the_answer() -> None:
    responses = [recorded(0, [1], [3]), recorded(1, [1], [2])]
    assert ordinals(select(said(([1], [2]), ([1], [3])), responses)) == [1, 0]


@pytest.mark.parametrize(
    "reported",
    [
        [([1], [2]), ([1], [2])],
        [([1], [2, 9])],
        [([1, 2], [2])],
        [([1], [2]), ([1, 2, 7], [4])],
    ],
    ids=["reported twice", "sampled tokens changed", "prompt changed", "never recorded"],
)
def test_reported_call_that_is_not_recorded_is_an_error(reported: list[tuple[list[int], list[int]]]) -> None:
    number = len(reported) - 1
    with pytest.raises(IntegrityError, match=rf"model call {number} of the answer .* equals none of the 1 recorded"):
        select(said(*reported), [recorded(0, [1], [2])])


def test_declaration_does_not_excuse_changed_tokens() -> None:
    made = said(([1], [9]), terminal_logical_request_id="chatcmpl-0")
    with pytest.raises(IntegrityError):
        select(made, [recorded(0, [1], [2])])


@st.composite
def trees(draw: st.DrawFn) -> list[AttemptCall]:
    """Calls that continue any call before them, or none."""
    size = draw(st.integers(1, 8))
    parents = [draw(st.one_of(st.none(), st.integers(0, ordinal - 1))) if ordinal else None for ordinal in range(size)]
    return [recorded(ordinal, parent=parent) for ordinal, parent in enumerate(parents)]


@given(trees())
def test_a_chain_goes_from_a_root_to_a_leaf_without_a_gap(calls: list[AttemptCall]) -> None:
    selection = select(silent(), calls)
    if selection.unselected is not None:
        return
    chain = selection.calls
    assert chain[0].parent is None
    assert [call.parent for call in chain[1:]] == [call.position for call in chain[:-1]]
    assert chain[-1].position not in [call.parent for call in calls]


@given(trees(), st.data())
def test_a_declared_response_ends_its_own_chain(calls: list[AttemptCall], data: st.DataObject) -> None:
    terminal = data.draw(st.sampled_from(calls))
    chain = select(silent(terminal_id=terminal.response_id), calls).calls
    assert chain[-1] is terminal
    assert [call.parent for call in chain] == [None, *(call.position for call in chain[:-1])]
