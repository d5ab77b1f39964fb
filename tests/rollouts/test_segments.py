"""Every sampled token stands in exactly one segment with mask 1, and no policy token silently becomes prompt."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import IntegrityError
from activities.rollouts.evidence import CallEvidence
from activities.rollouts.segments import cut
from tests.rollouts.building import call, declared

REWRITTEN = (
    ([1, 2, 3], [4, 5]),
    ([1, 2, 3, 4, 5, 6], [7]),
    ([1, 2, 3, 4, 9, 6, 7, 8], [10]),
    ([1, 2, 3, 4, 5, 6, 7, 8], [11]),
)
GOLDEN_TOKENS = [
    [1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 4, 9, 6, 7, 8, 10],
    [1, 2, 3, 4, 5, 6, 7, 8, 11],
]
GOLDEN_MASKS = [[0, 0, 0, 1, 1, 0, 1], [0] * 8 + [1], [0] * 8 + [1]]


def test_turns_that_extend_each_other_are_one_segment() -> None:
    segments, places = cut([call(*turn) for turn in REWRITTEN[:2]])
    assert places == [0, 0]
    assert segments[0].tokens == [1, 2, 3, 4, 5, 6, 7]
    assert segments[0].loss_mask == [0, 0, 0, 1, 1, 0, 1]
    assert segments[0].log_probs == [0, 0, 0, -1.0, -2.0, 0, -1.0]


DECLARED = (declared(0), declared(0), declared(1, "history_policy_rewrite"), declared(2, "history_policy_rewrite"))


def test_declared_boundaries_cut_the_golden_episode_into_three_rows() -> None:
    calls = [call(*turn, declaration) for turn, declaration in zip(REWRITTEN, DECLARED, strict=True)]
    segments, places = cut(calls)
    assert places == [0, 0, 1, 2]
    assert [segment.tokens for segment in segments] == GOLDEN_TOKENS
    assert [segment.loss_mask for segment in segments] == GOLDEN_MASKS
    assert sum(sum(segment.loss_mask) for segment in segments) == 5
    assert [segment.boundary for segment in segments] == [None, *["history_policy_rewrite"] * 2]


def test_recorded_boundaries_cut_the_golden_episode_into_the_same_rows() -> None:
    reasons = (None, None, "two calls may be meant", "no earlier call is known")
    segments, places = cut([call(*turn, new_segment=reason) for turn, reason in zip(REWRITTEN, reasons, strict=True)])
    assert places == [0, 0, 1, 2]
    assert [segment.tokens for segment in segments] == GOLDEN_TOKENS
    assert [segment.loss_mask for segment in segments] == GOLDEN_MASKS
    assert [segment.boundary for segment in segments] == [None, "two calls may be meant", "no earlier call is known"]


def test_first_call_needs_no_boundary_and_has_none() -> None:
    (segment,), _ = cut([call([1], [2], new_segment="no earlier call is known")])
    assert segment.boundary is None


def test_recorded_boundary_cuts_even_where_the_tokens_happen_to_extend() -> None:
    segments, _ = cut([call([1], [2]), call([1, 2, 3], [4], new_segment="two calls may be meant")])
    assert [segment.tokens for segment in segments] == [[1, 2], [1, 2, 3, 4]]


def test_rewrite_without_a_boundary_fails_the_whole_rollout() -> None:
    with pytest.raises(IntegrityError, match="Material rewrite before turn 3 has no boundary record"):
        cut([call(*turn) for turn in REWRITTEN])


def test_rewrite_inside_a_declared_segment_is_not_excused_by_earlier_boundaries() -> None:
    calls = [
        call(*turn, declaration) for turn, declaration in zip(REWRITTEN, (*DECLARED[:3], declared(1)), strict=True)
    ]
    with pytest.raises(IntegrityError, match="Material rewrite before turn 4"):
        cut(calls)


def test_declared_continuation_is_not_excused_by_what_the_model_server_recorded() -> None:
    with pytest.raises(IntegrityError, match="Material rewrite before turn 2"):
        cut([call([1], [2], declared(0)), call([7], [8], declared(0), new_segment="no earlier call is known")])


def test_shorter_prompt_that_is_a_prefix_of_the_past_is_a_rewrite() -> None:
    with pytest.raises(IntegrityError, match="before turn 2"):
        cut([call([1, 2, 3], [4]), call([1, 2], [3])])


def test_contiguity_is_against_the_call_before_and_not_an_older_segment() -> None:
    calls = [call([1, 2], [3]), call([9], [8], declared(1, "b")), call([1, 2, 3, 4], [5], declared(2, "b"))]
    segments, _ = cut(calls)
    assert segments[2].tokens == [1, 2, 3, 4, 5]
    assert segments[2].loss_mask == [0, 0, 0, 0, 1]


def test_boundary_that_rewrites_nothing_is_refused() -> None:
    with pytest.raises(IntegrityError, match="Boundary for turn 2 does not correspond to a rewrite"):
        cut([call([1], [2], declared(0)), call([1, 2, 3], [4], declared(1, "b"))])


def test_call_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(IntegrityError, match="turn 2 has no sampled tokens"):
        cut([call([1], [2]), call([1, 2, 3], [])])


def test_no_calls_are_no_segments() -> None:
    assert cut([]) == ([], [])


TOKENS = st.integers(min_value=100, max_value=104)


@dataclass(frozen=True)
class Episode:
    calls: list[CallEvidence]
    segments: list[int]


@st.composite
def episodes(draw: st.DrawFn, min_segments: int = 1) -> Episode:
    """Calls with declared boundaries; prompts of segment i begin with token i, so that no segment extends another."""
    calls: list[CallEvidence] = []
    places: list[int] = []
    log_prob = -1.0
    for segment in range(draw(st.integers(min_segments, 4))):
        context = [segment]
        for _ in range(draw(st.integers(1, 4))):
            prompt = context + draw(st.lists(TOKENS, max_size=3))
            sampled = draw(st.lists(TOKENS, min_size=1, max_size=3))
            starts = segment > 0 and context == [segment]
            declaration = declared(segment, "rewrite" if starts else None)
            calls.append(call(prompt, sampled, declaration, first_log_prob=log_prob))
            log_prob -= len(sampled)
            context = prompt + sampled
            places.append(segment)
    return Episode(calls, places)


@given(episodes())
def test_every_sampled_token_is_trained_exactly_once_with_its_own_log_probability(episode: Episode) -> None:
    segments, places = cut(episode.calls)
    assert places == episode.segments
    kept = [
        (token, log_prob)
        for segment in segments
        for token, mask, log_prob in zip(segment.tokens, segment.loss_mask, segment.log_probs, strict=True)
        if mask == 1
    ]
    sampled = [pair for call in episode.calls for pair in zip(call.sampled_tokens, call.log_probs, strict=True)]
    assert kept == sampled
    assert len({log_prob for _, log_prob in kept}) == len(kept)


@given(episodes())
def test_what_was_only_read_has_no_mask_and_no_log_probability(episode: Episode) -> None:
    for segment in cut(episode.calls)[0]:
        assert set(segment.loss_mask) <= {0, 1}
        assert all(
            log_prob == 0 for log_prob, mask in zip(segment.log_probs, segment.loss_mask, strict=True) if not mask
        )


@given(episodes())
def test_prompts_can_be_read_back_from_their_segments(episode: Episode) -> None:
    segments, places = cut(episode.calls)
    for made, place in zip(episode.calls, places, strict=True):
        whole = made.prompt_tokens + made.sampled_tokens
        assert segments[place].tokens[: len(whole)] == whole


@given(episodes(min_segments=2))
def test_without_declarations_a_rewrite_never_passes(episode: Episode) -> None:
    with pytest.raises(IntegrityError, match=f"before turn {episode.segments.index(1) + 1} "):
        cut([replace(made, declared=None) for made in episode.calls])
