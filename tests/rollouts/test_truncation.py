"""Golden numbers of NeMo-RL's `truncate_noncontiguous_episodes`, and its metric."""

import pytest

from activities.errors import IntegrityError
from activities.rollouts.answer import parse
from activities.rollouts.answer_evidence import evidence
from activities.rollouts.outcome import judge
from activities.rollouts.truncation import kept, metrics, was_truncated
from storage.capture_ids import capture_id
from storage.records import SettledRollout
from tests.rollouts.building import answer, call, declared, item, request
from tests.rollouts.test_segments import REWRITTEN

GYM_ID = capture_id(request().rollout_id)


def settled(index: int, reported: int, selected: int, reward: float | None = 1.0) -> SettledRollout:
    group_id = "climb/step-0/group-0"
    return SettledRollout.model_validate(
        {
            "rollout_id": f"{group_id}/rollout-{index}",
            "group_id": group_id,
            "index": index,
            "state": "valid" if reward is not None else "lost",
            "attempt": 0,
            "reward": reward,
            "truncated": False,
            "reason": None,
            "policy_version_min": 0,
            "policy_version_max": 0,
            "evidence_digest": "e" * 64,
            "segments": 1,
            "model_calls": selected,
            "attempts": 1,
            "generated_calls": reported,
            "replayed_calls": 0,
        }
    )


def test_golden_episode_is_kept_up_to_its_first_rewrite() -> None:
    made = parse(answer(*(item(*turn) for turn in REWRITTEN), reward=0.75), GYM_ID)
    ended = evidence(made, 0, truncate=True)
    settlement, rows = judge(request(), 0, ended, max_row_tokens=100, overlong_filtering=False)
    assert rows is not None
    (row,) = rows.rows
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert (settlement.state, settlement.reward) == ("valid", 0.75)
    assert [selected.ordinal for selected in settlement.selected] == [0, 1]
    assert [reported.prompt_tokens for reported in settlement.reported] == [3, 6, 8, 8]


def test_golden_episode_is_an_error_without_the_option() -> None:
    made = parse(answer(*(item(*turn) for turn in REWRITTEN)), GYM_ID)
    with pytest.raises(IntegrityError, match="before turn 3"):
        judge(request(), 0, evidence(made, 0, truncate=False), max_row_tokens=100, overlong_filtering=False)


def test_call_that_would_be_contiguous_again_is_dropped_too() -> None:
    assert len(kept([call(*turn) for turn in REWRITTEN])) == 2


def test_prompt_shorter_than_what_was_seen_is_a_rewrite() -> None:
    assert len(kept([call([1, 2, 3], [4, 5, 6, 7]), call([1, 2], [3])])) == 1


def test_item_without_tokens_is_skipped_and_cuts_nothing() -> None:
    made = parse(answer(item([1, 2, 3], [4, 5]), item([9, 9], []), item([1, 2, 3, 4, 5, 6], [7])), GYM_ID)
    assert len(evidence(made, 0, truncate=True).calls) == 2


def test_declared_boundary_is_no_rewrite() -> None:
    calls = [call([1], [2], declared(0)), call([9], [8], declared(1, "rewrite")), call([9, 8, 7], [6], declared(1))]
    assert len(kept(calls)) == 3


def test_first_call_is_always_kept() -> None:
    assert len(kept([call([1], [2])])) == 1


def test_malformed_tokens_are_an_error_with_the_option_too() -> None:
    with pytest.raises(IntegrityError, match="log-probabilities"):
        parse(answer(item([1], [2]), item([1, 2], [3]) | {"generation_log_probs": []}), GYM_ID)


def test_metric_of_a_group_of_four_with_one_cut_episode() -> None:
    group = [settled(0, 4, 2), *(settled(index, 3, 3) for index in (1, 2, 3))]
    assert metrics({"swe": group, "math": [settled(0, 1, 1)]}) == {
        "swe/noncontiguous_truncated/mean": 0.25,
        "swe/noncontiguous_truncated/max": 1.0,
        "swe/noncontiguous_truncated/min": 0.0,
        "swe/noncontiguous_truncated/median": 0.0,
        "swe/noncontiguous_truncated/stddev": 0.5,
        "math/noncontiguous_truncated/mean": 0.0,
        "math/noncontiguous_truncated/max": 0.0,
        "math/noncontiguous_truncated/min": 0.0,
        "math/noncontiguous_truncated/median": 0.0,
        "math/noncontiguous_truncated/stddev": 0.0,
    }


def test_lost_rollout_has_no_episode_to_count() -> None:
    assert metrics({"swe": [settled(0, 0, 0, reward=None)]}) == {}


def test_flag_starts_anew_with_every_rollout() -> None:
    assert [was_truncated(settled(0, 4, 2)), was_truncated(settled(1, 4, 4))] == [True, False]
