"""Golden numbers of the GRPO maths, 20 to 49: what every trainer that follows NeMo-RL's formulas must give.

Computed by hand from the formulas. A number that is missing here belongs to another subject: 28 is the rule by which a
group is set aside, 37 and 38 are tests of episodes, 43 to 48 of compaction and of the ledger. Where upstream has two
answers (26, 27, 29, 36), the test says which is Onbelay's.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from activities.rollouts.answer import parse
from activities.rollouts.ledger_evidence import evidence
from activities.rollouts.segments import cut
from activities.training.advantages import group_advantages
from activities.training.assembly import assemble
from activities.training.batch import TrainingBatch
from activities.training.importance import importance_weights
from activities.training.kl import kl_penalty
from activities.training.loss import grpo_loss
from activities.training.microbatches import padding_rows
from activities.training.policy_loss import policy_loss, probability_ratio
from activities.training.row_filter import row_errors
from configs.grpo import GrpoConfig, LossConfig
from storage.capture_ids import capture_id
from tests.rollouts.building import answer, call, declared, item, recorded, request
from tests.training.rollouts import own_rows, passes, row, settled
from workflows.group_rollouts import GroupRollouts
from workflows.messages import GroupInput, RolloutResult, WeightsRef

NO_KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def advantages(rewards: list[float], valid: list[bool] | None = None, *, leave_one_out: bool = True) -> list[float]:
    valid = valid or [True] * len(rewards)
    return group_advantages(rewards, valid, leave_one_out=leave_one_out, normalize=True, std_epsilon=1e-6)


@pytest.mark.parametrize(
    ("rewards", "leave_one_out", "expected"),
    [
        pytest.param([1, 0], True, [1, -1], id="20"),
        pytest.param([1, 0], False, [0.707106, -0.707106], id="20-group-mean"),
        pytest.param([1, 1, 0, 0], True, [1.154699, 1.154699, -1.154699, -1.154699], id="21"),
        pytest.param([1, 1, 0, 0], False, [0.866024, 0.866024, -0.866024, -0.866024], id="21-group-mean"),
        pytest.param([1, 0, 0, 0], True, [1.0, -0.577349, -0.577349, -0.577349], id="22"),
        pytest.param([1, 0, 0, 0], False, [1.499997, -0.499999, -0.499999, -0.499999], id="22-group-mean"),
        pytest.param([1, 1, 1, 0], True, [0.577349, 0.577349, 0.577349, -1.0], id="23"),
        pytest.param([1, 0, 0.5], True, [2.121314, -2.121314, 0], id="24"),
        pytest.param([0.5, 0, 1, 0.25], True, [0.160128, -1.527521, 2.999988, -0.499999], id="24-four"),
        pytest.param([0.7, 0.7, 0.7], True, [0, 0, 0], id="25"),
        pytest.param([1], True, [0], id="25-alone"),
    ],
)
def test_20_to_25_advantages(rewards: list[float], leave_one_out: bool, expected: list[float]) -> None:
    assert advantages(rewards, leave_one_out=leave_one_out) == pytest.approx(expected, abs=1e-6)


def test_21_raw_advantages_are_distances_to_the_mean_of_the_others() -> None:
    raw = group_advantages([1, 1, 0, 0], [True] * 4, leave_one_out=True, normalize=False, std_epsilon=1e-6)

    assert raw == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3], abs=1e-9)


def test_26_a_masked_sibling_does_not_vote() -> None:
    result = advantages([1, 0, 1, 0], [True, True, True, False])

    assert result == pytest.approx([0.707106, -1.0, 0.707106, 0.0], abs=1e-6)


def test_27_a_rollout_whose_only_sibling_is_masked_has_nothing_to_compare_with() -> None:
    assert advantages([0, 1], [False, True]) == [0.0, 0.0]


def test_28_the_lone_winner_of_a_group_trains_though_its_siblings_do_not_differ() -> None:
    """Upstream's dynamic sampling would drop this row, for its leave-one-out deviation is 0; a group trains whole."""
    assert all(advantages([1, 0, 0, 0]))


def test_29_equal_prompts_of_two_groups_are_two_baselines() -> None:
    rollouts = [settled(0, 0, 1.0), settled(0, 1, 0.0), settled(1, 0, 1.0), settled(1, 1, 1.0)]
    batch = assemble("run", 0, rollouts, own_rows(rollouts), GrpoConfig())

    assert [one.advantage for one in batch.rows] == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("advantage", "ratio", "options", "expected"),
    [
        (1, 1.5, {}, -1.2),
        (1, 0.5, {}, -0.5),
        (-1, 1.5, {}, 1.5),
        (-1, 0.5, {}, 0.8),
        (-1, 5.0, {}, 5.0),
        (-1, 5.0, {"ratio_clip_c": 3.0}, 3.0),
        (-1, 2.0, {"ratio_clip_c": 3.0}, 2.0),
        (1, 1.5, {"ratio_clip_c": 3.0}, -1.2),
        (1, 1.5, {"ratio_clip_max": 0.28}, -1.28),
    ],
)
def test_30_clips(advantage: float, ratio: float, options: dict[str, Any], expected: float) -> None:
    config, curr = LossConfig(**options), number(math.log(ratio))
    seen = probability_ratio(curr, number(0), number(1), config)

    assert seen.item() == pytest.approx(ratio, abs=1e-6)
    assert policy_loss(curr, seen, number(advantage), config).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("token_level", "expected"), [(True, -0.5), (False, 0.0)])
def test_31_a_long_rollout_counts_by_its_tokens_or_once(token_level: bool, expected: float) -> None:
    long, short = settled(0, 0, 1.0), settled(0, 1, 0.0)
    rows = {long.rollout_id: [row(long, sampled=3)], short.rollout_id: [row(short, sampled=1)]}

    assert loss_of(assemble("run", 0, [long, short], rows, GrpoConfig()), token_level) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "lowest", "highest", "expected"),
    [(None, None, None, 1.648721), ("tis", None, 1.2, 1.2), ("icepop", 0.5, 1.2, 0.0)],
)
def test_32_importance_weights(kind: str | None, lowest: float | None, highest: float | None, expected: float) -> None:
    config = LossConfig.model_validate(
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": highest,
            "truncated_importance_sampling_ratio_min": lowest,
        }
    )
    weight, _ = importance_weights(number(-1.0), number(-1.5), number(1), config)

    assert weight.item() == pytest.approx(expected, abs=1e-6)


def test_32_without_correction_the_weight_is_one() -> None:
    curr, generation, one = number(-1.0), number(-1.5), number(1)

    assert grpo_loss(curr, curr, generation, None, one, one, one, LossConfig(**NO_KL)).loss.item() == -1.0


@pytest.mark.parametrize(
    ("kind", "log_ratio", "expected"),
    [
        ("k1", 1.0, -1.0),
        ("k2", 1.0, 0.5),
        ("k3", 1.0, 0.718282),
        ("k1", -1.0, 1.0),
        ("k2", -1.0, 0.5),
        ("k3", -1.0, 0.367879),
        ("k1", 25.0, -10.0),
        ("k2", 25.0, 10.0),
        ("k3", 25.0, 10.0),
    ],
)
def test_33_kl_and_its_clamps(kind: str, log_ratio: float, expected: float) -> None:
    config = LossConfig.model_validate({"reference_policy_kl_type": kind})

    assert kl_penalty(number(0.0), number(log_ratio), config).item() == pytest.approx(expected, abs=1e-6)


def test_34_the_error_of_a_row_is_the_mean_factor_between_the_two_engines() -> None:
    prev = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    generation = prev + torch.tensor([[0.1, -0.2, 0.0]], dtype=torch.float64)

    error = row_errors(prev, generation, torch.ones(1, 3)).item()

    assert error == pytest.approx(1.108858, abs=1e-6)
    assert 1.1 < error <= 1.11


def test_35_a_row_trains_nothing_by_its_first_token() -> None:
    first = row(settled(0, 0, 1.0), prompt=0, sampled=1, after=2)

    assert (first.loss_mask.tolist(), first.trained_tokens) == ([1, 0, 0], 0)
    (micro,) = passes(TrainingBatch("run", 0, (first,)), rows_per_pass=1)
    assert (micro.loss_mask.sum().item(), micro.weights.sum().item(), micro.count) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("finish_reason", "truncated"), [("length", True), ("stop", False), ("tool_calls", False)])
def test_36_a_rollout_is_truncated_where_its_last_reply_was_cut_off(finish_reason: str, truncated: bool) -> None:
    """Upstream compares the number of tokens with the limit, and takes a reply that just fits for a cut one."""
    calls = [recorded(0, [1], [2], finish_reason="length"), recorded(1, [1, 2, 3], [4], finish_reason=finish_reason)]

    told = parse(answer(item([1], [2]), item([1, 2, 3], [4])), capture_id(request().rollout_id))
    assert evidence(told, calls, None, 3).truncated is truncated


REWRITTEN = (
    ([1, 2, 3], [4, 5]),
    ([1, 2, 3, 4, 5, 6], [7]),
    ([1, 2, 3, 4, 9, 6, 7, 8], [10]),
    ([1, 2, 3, 4, 5, 6, 7, 8], [11]),
)


def test_39_an_episode_that_is_rewritten_twice_is_three_rows_and_loses_no_sampled_token() -> None:
    told = (declared(0), declared(0), declared(1, "rewrite"), declared(2, "rewrite"))
    segments, _ = cut([call(*turn, declaration) for turn, declaration in zip(REWRITTEN, told, strict=True)])

    assert [segment.tokens for segment in segments] == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 9, 6, 7, 8, 10],
        [1, 2, 3, 4, 5, 6, 7, 8, 11],
    ]
    assert [segment.loss_mask for segment in segments] == [[0, 0, 0, 1, 1, 0, 1], [0] * 8 + [1], [0] * 8 + [1]]


def test_40_segments_share_their_rollouts_advantage_and_a_padding_row_changes_nothing() -> None:
    winner, loser = settled(0, 0, 1.0, segments=2), settled(0, 1, 0.0)
    rows = {
        winner.rollout_id: [row(winner, 0, sampled=5), row(winner, 1, sampled=3)],
        loser.rollout_id: [row(loser, sampled=2)],
    }
    batch = assemble("run", 0, [winner, loser], rows, GrpoConfig())

    assert [one.advantage for one in batch.rows] == [1.0, 1.0, -1.0]
    assert (batch.rollouts, len(batch.rows), batch.trained_tokens) == (2, 3, 10)
    (micro,) = passes(batch, rows_per_pass=4)
    assert (micro.rows.count(None), len(micro.rows), micro.count) == (1, 4, 10)
    assert loss_of(batch, token_level=True) == pytest.approx(-0.6, abs=1e-6)


@pytest.mark.parametrize(("rows", "quantum", "expected"), [(4, 4, 0), (5, 4, 3), (7, 8, 1), (9, 8, 7), (11, 4, 1)])
def test_41_padding_rows(rows: int, quantum: int, expected: int) -> None:
    assert padding_rows(rows, quantum) == expected


def test_42_a_masked_rollout_keeps_its_place_with_exactly_row() -> None:
    masked, valid = settled(0, 0, 1.0, "masked", segments=3), settled(0, 1, 1.0)
    batch = assemble("run", 0, [masked, valid], {valid.rollout_id: [row(valid)]}, GrpoConfig())

    assert [(one.rollout_id, one.is_placeholder) for one in batch.rows] == [
        (masked.rollout_id, True),
        (valid.rollout_id, False),
    ]
    assert batch.rollouts == 2


def test_49_the_weight_version_of_a_group_is_the_oldest_of_its_valid_rollouts() -> None:
    weights = WeightsRef(version=6, path="w", digest="d")
    nothing_to_call: Any = None
    group = GroupRollouts(
        GroupInput.model_construct(num_rollouts=4, weights=weights), "g", nothing_to_call, lambda: None
    )
    states = {4: "valid", 5: "valid", 3: "masked"}
    group.results = {
        index: RolloutResult.model_validate(
            {
                "rollout_id": f"r{index}",
                "index": index,
                "state": states[version],
                "attempt": 0,
                "reward": 1.0,
                "model_calls": 1,
                "segments": 1,
                "policy_version": version,
                "reason": None,
            }
        )
        for index, version in enumerate((5, 3, 4, 5))
    }

    assert group.oldest_version() == 4
    group.results = {}
    assert group.oldest_version() == 6


def loss_of(batch: TrainingBatch, token_level: bool) -> float:
    """The loss of a step at ratio 1, without a KL term."""
    total, count = 0.0, 0
    for micro in passes(batch, 2, token_level=token_level):
        same = micro.generation_log_probs
        config = LossConfig(token_level_loss=token_level, **NO_KL)
        total += grpo_loss(same, same, same, None, micro.advantages, micro.loss_mask, micro.weights, config).loss.item()
        count += micro.count
    return total / count
