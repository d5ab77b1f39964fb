"""What trains is what was recorded: every sampled token of a selected response once, nothing of a dead branch."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import IntegrityError
from activities.rollouts.answer import parse
from activities.rollouts.evidence import Evidence
from activities.rollouts.ledger_evidence import evidence, unanswered
from activities.rollouts.outcome import judge
from storage.capture_ids import capture_id
from storage.records import AttemptCall
from tests.rollouts.building import answer, failed, item, measured, real_answer, recorded, request

GYM_ID = capture_id(request().rollout_id)


def proven(made: dict[str, object], *calls: AttemptCall, content: str | None = None) -> Evidence:
    assert content in (None, "context_overflow")
    return evidence(parse(made, GYM_ID), calls, content, 3)


def recording_of(made: dict[str, object]) -> list[AttemptCall]:
    """What a model server records of the calls of an answer."""
    return [
        recorded(call.ordinal, call.prompt_tokens, call.sampled_tokens, continuity="root")
        for call in parse(made, GYM_ID).calls
    ]


def test_log_probabilities_are_the_recorded_ones() -> None:
    (call,) = proven(answer(item([1, 2], [3, 4])), recorded(0, [1, 2], [3, 4])).calls
    assert call.log_probs == [-0.25, -0.375]
    assert (call.response_id, call.finish_reason) == ("chatcmpl-0", "stop")


def test_declared_segments_of_the_compaction_agent_meet_the_recorded_tokens() -> None:
    made = real_answer("compaction")
    settlement, rows = judge(
        request(), 0, proven(made, *recording_of(made)), max_row_tokens=10_000, overlong_filtering=False
    )
    assert rows is not None
    assert [selected.segment for selected in settlement.selected] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert (settlement.reported, rows.trained_tokens) == ((), 143)


def test_versions_are_the_oldest_and_the_newest_that_sampled_a_selected_response() -> None:
    first = recorded(0, [1], [2, 3, 4], versions=[(4, 1), (5, 2)])
    dead = recorded(1, [1], [9], versions=[(1, 1)])
    last = recorded(2, [1, 2, 3, 4], [5], versions=[(7, 1)], parent=0)
    made = answer(item([1], [2, 3, 4]), item([1, 2, 3, 4], [5]))
    assert proven(made, first, dead, last).policy_versions == (4, 7)


def test_without_a_selected_response_the_version_is_the_steps() -> None:
    assert unanswered("guard_refused", 6).policy_versions == (6, 6)
    overflowed = proven(real_answer("context_overflow"), failed(0, "ContextOverflow"), content="context_overflow")
    assert (overflowed.policy_versions, overflowed.reason, overflowed.calls) == ((3, 3), "context_overflow", ())


def test_last_reply_that_was_cut_off_makes_the_rollout_truncated() -> None:
    assert proven(answer(item([1], [2])), recorded(0, finish_reason="length")).truncated
    assert not proven(answer(item([1], [2])), recorded(0)).truncated


def test_model_server_that_does_not_record_is_named_with_what_to_do() -> None:
    for made in (answer(item([1], [2])), answer(), answer(item([1], [2]), mask_sample=True)):
        with pytest.raises(
            IntegrityError, match=r"workers\.gym\.policy_model\.app.*or set rollouts\.evidence: response"
        ):
            proven(made)


def test_environment_that_masks_before_any_call_needs_no_record() -> None:
    masked = proven(answer(mask_sample=True, failure_reason="sandbox did not start", reward=0.0))
    assert (masked.reason, masked.calls) == ("sandbox did not start", ())


def test_answer_whose_calls_all_failed_has_no_generation_data() -> None:
    with pytest.raises(IntegrityError, match="no generation data"):
        proven(answer(), measured(0), failed(1, "GenerationRefused"))


def test_ambiguous_chain_masks_the_rollout() -> None:
    ambiguous = proven(answer(), recorded(0), recorded(1, parent=0), recorded(2, parent=0))
    assert ambiguous.reason is not None
    assert ambiguous.reason.startswith("ambiguous_terminal")
    assert (ambiguous.reward, ambiguous.calls) == (1.0, ())


def test_log_probability_that_is_no_number_is_an_error() -> None:
    broken = recorded(0).model_copy(update={"log_probs": (math.nan,)})
    with pytest.raises(IntegrityError, match="call 0: a recorded log-probability is not a finite number"):
        proven(answer(item([1], [2])), broken)


TOKENS = st.lists(st.integers(10, 14), min_size=1, max_size=3)


@dataclass(frozen=True)
class Attempt:
    """Recorded responses, and those of them that the agent went on from."""

    calls: list[AttemptCall]
    selected: list[AttemptCall]
    segments: int


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """Turns with best-of-n, abandoned branches, failed calls and recorded boundaries; segment i begins with token i."""
    calls: list[AttemptCall] = []
    selected: list[AttemptCall] = []
    segments = draw(st.integers(1, 3))
    for segment in range(segments):
        context = [segment]
        for turn in range(draw(st.integers(1, 3))):
            prompt = context + draw(st.lists(st.integers(20, 22), max_size=2))
            candidates: list[AttemptCall] = []
            for _ in range(draw(st.integers(1, 3))):
                if draw(st.booleans()):
                    calls.append(failed(len(calls), "GenerationUnavailable"))
                starts = segment > 0 and turn == 0
                parent = selected[-1].ordinal if selected and not starts else None
                kind = "new_segment" if starts else None
                candidates.append(recorded(len(calls), prompt, draw(TOKENS), parent=parent, continuity=kind))
                calls.append(candidates[-1])
            selected.append(draw(st.sampled_from(candidates)))
            context = [*prompt, *selected[-1].sampled_token_ids]
    return Attempt(calls, selected, segments)


@given(attempts())
def test_every_sampled_token_of_a_selected_response_bears_loss_in_exactly_one_row(attempt: Attempt) -> None:
    made = answer(*(item(list(call.prompt_token_ids), list(call.sampled_token_ids)) for call in attempt.selected))
    settlement, rows = judge(
        request(), 0, proven(made, *attempt.calls), max_row_tokens=10_000, overlong_filtering=False
    )
    assert rows is not None
    assert settlement.segments == len(rows.rows) == attempt.segments
    by_ordinal = {call.ordinal: call for call in attempt.calls}
    chosen = [by_ordinal[selected.ordinal] for selected in settlement.selected]
    assert len(set(by_ordinal) & {call.ordinal for call in chosen}) == len(attempt.selected)
    assert [call.sampled_token_ids for call in chosen] == [call.sampled_token_ids for call in attempt.selected]
    bearing = [
        (int(token), float(log_prob))
        for row in rows.rows
        for token, mask, log_prob in zip(row.tokens, row.loss_mask, row.log_probs, strict=True)
        if mask
    ]
    assert bearing == [
        (token, float(np.float32(log_prob)))
        for call in chosen
        for token, log_prob in zip(call.sampled_token_ids, call.log_probs, strict=True)
    ]
    assert sum(int(row.loss_mask.sum()) for row in rows.rows) == sum(call.generated_tokens for call in chosen)
