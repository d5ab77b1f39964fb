"""One advantage per rollout, copied to each of its rows; masked and lost rollouts never vote."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.assembly import assemble, mean_reward
from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.loss import policy_loss
from activities.training.microbatches import micro_batches
from configs.grpo import GrpoConfig
from storage.records import SettledRollout

GRPO = GrpoConfig()


def settled(group: int, index: int, reward: float | None, state: str = "valid") -> SettledRollout:
    group_id = f"climb/step-0/group-{group}"
    return SettledRollout.model_validate(
        {
            "rollout_id": f"{group_id}/rollout-{index}",
            "group_id": group_id,
            "index": index,
            "state": state,
            "attempt": 0,
            "reward": reward,
            "truncated": False,
            "reason": None,
            "policy_version_min": 0,
            "policy_version_max": 0,
            "evidence_digest": "e" * 64,
            "segments": 1,
            "model_calls": 1,
            "attempts": 1,
            "generated_calls": 1,
            "replayed_calls": 0,
        }
    )


def row(owner: SettledRollout, segment: int, sampled: int) -> TrainingRow:
    """Two prompt tokens, then sampled ones."""
    mask = np.array([0, 0] + [1] * sampled, dtype=np.uint8)
    return TrainingRow(
        rollout_id=owner.rollout_id,
        segment=segment,
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        log_probs=-0.5 * mask.astype(np.float32),
        advantage=0.0,
    )


def one_row_each(rollouts: list[SettledRollout]) -> dict[str, list[TrainingRow]]:
    return {rollout.rollout_id: [row(rollout, 0, 1)] for rollout in rollouts if rollout.state == "valid"}


def test_rollout_in_two_segments_counts_once_and_lends_its_advantage_to_both() -> None:
    winner, loser = settled(0, 0, 1.0), settled(0, 1, 0.0)
    rows = {winner.rollout_id: [row(winner, 0, 5), row(winner, 1, 3)], loser.rollout_id: [row(loser, 0, 2)]}
    batch = assemble("climb", 7, [winner, loser], rows, GRPO)
    assert [item.advantage for item in batch.rows] == [1.0, 1.0, -1.0]
    assert [(item.rollout_id, item.segment) for item in batch.rows] == [
        (winner.rollout_id, 0),
        (winner.rollout_id, 1),
        (loser.rollout_id, 0),
    ]
    assert (batch.run_id, batch.step, batch.rollouts, batch.trained_tokens) == ("climb", 7, 2, 10)


def test_golden_group_has_two_owners_three_rows_one_padding_row_and_a_loss_of_minus_six_tenths() -> None:
    winner, loser = settled(0, 0, 1.0), settled(0, 1, 0.0)
    rows = {winner.rollout_id: [row(winner, 0, 5), row(winner, 1, 3)], loser.rollout_id: [row(loser, 0, 2)]}
    batch = assemble("climb", 0, [winner, loser], rows, GRPO)
    (micro,) = micro_batches(
        batch, rows_per_pass=4, data_parallel_size=1, data_parallel_rank=0, device=torch.device("cpu")
    )
    assert (batch.rollouts, len(batch.rows), len(micro.tokens)) == (2, 3, 4)
    log_probs = micro.generation_log_probs
    loss, _ = policy_loss(log_probs, log_probs, micro.advantages, GRPO.loss_fn)
    assert micro.trained_tokens == 10
    assert (loss * micro.loss_mask).sum().item() / 10 == pytest.approx(-0.6)


def test_masked_rollout_of_three_segments_keeps_its_place_with_one_row_that_trains_nothing() -> None:
    masked, valid = settled(0, 0, 1.0, "masked").model_copy(update={"segments": 3}), settled(0, 1, 1.0)
    batch = assemble("climb", 0, [masked, valid], one_row_each([masked, valid]), GRPO)
    assert [item.rollout_id for item in batch.rows] == [masked.rollout_id, valid.rollout_id]
    assert (batch.rollouts, batch.trained_tokens) == (2, 1)
    kept = batch.rows[0]
    assert (kept.tokens.tolist(), kept.loss_mask.tolist(), kept.log_probs.tolist()) == ([0], [0], [0.0])
    assert (kept.advantage, kept.is_placeholder, batch.rows[1].is_placeholder) == (0.0, True, False)


def test_placeholders_change_neither_tokens_nor_loss() -> None:
    valid = [settled(0, index, reward) for index, reward in enumerate((1.0, 0.0))]
    gone = [settled(0, 2, None, "lost"), settled(0, 3, 1.0, "masked")]
    without = assemble("climb", 0, valid, one_row_each(valid), GRPO)
    padded = assemble("climb", 0, [*valid, *gone], one_row_each(valid), GRPO)
    assert padded.trained_tokens == without.trained_tokens
    assert [item.advantage for item in padded.rows] == [1.0, -1.0, 0.0, 0.0]
    assert TrainingBatch.from_bytes(padded.to_bytes()).rollouts == 4


def test_masked_rollout_leaves_baseline_and_deviation_alone() -> None:
    rollouts = [settled(0, 0, 1.0), settled(0, 1, 0.0), settled(0, 2, 1.0), settled(0, 3, 0.0, "masked")]
    batch = assemble("climb", 0, rollouts, one_row_each(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == pytest.approx([0.707106, -1.0, 0.707106, 0.0], abs=1e-6)


def test_single_valid_rollout_has_no_advantage() -> None:
    rollouts = [settled(0, 0, 0.0, "masked"), settled(0, 1, 1.0)]
    batch = assemble("climb", 0, rollouts, one_row_each(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == [0.0, 0.0]


def test_group_is_known_by_its_id_and_not_by_its_prompt() -> None:
    rollouts = [settled(0, 0, 1.0), settled(0, 1, 0.0), settled(1, 0, 1.0), settled(1, 1, 1.0)]
    batch = assemble("climb", 0, rollouts, one_row_each(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == [1.0, -1.0, 0.0, 0.0]


def test_formula_is_that_of_the_recipe() -> None:
    rollouts = [settled(0, index, reward) for index, reward in enumerate((1.0, 1.0, 0.0, 0.0))]
    plain = GrpoConfig(use_leave_one_out_baseline=False, normalize_rewards=False)
    assert [item.advantage for item in assemble("climb", 0, rollouts, one_row_each(rollouts), plain).rows] == [
        0.5,
        0.5,
        -0.5,
        -0.5,
    ]


REWARDS = st.floats(min_value=-10, max_value=10)
OUTCOMES = st.lists(
    st.tuples(st.sampled_from(["valid", "masked", "lost"]), REWARDS, st.integers(1, 3)), min_size=1, max_size=8
)


@given(OUTCOMES, st.lists(REWARDS, min_size=8, max_size=8))
def test_bytes_are_the_same_every_time_and_blind_to_rewards_that_do_not_vote(
    outcomes: list[tuple[str, float, int]], others: list[float]
) -> None:
    first = [settled(0, index, reward, state) for index, (state, reward, _) in enumerate(outcomes)]
    second = [
        settled(0, index, reward if state == "valid" else others[index], state)
        for index, (state, reward, _) in enumerate(outcomes)
    ]
    rows = {
        rollout.rollout_id: [row(rollout, segment, 2) for segment in range(segments)]
        for rollout, (_, _, segments) in zip(first, outcomes, strict=True)
        if rollout.state == "valid"
    }
    batch = assemble("climb", 0, first, rows, GRPO)
    assert batch.to_bytes() == assemble("climb", 0, second, dict(reversed(rows.items())), GRPO).to_bytes()
    assert {item.rollout_id for item in batch.rows if not item.is_placeholder} == set(rows)
    assert batch.rollouts == len(first)
    for owner in rows:
        assert len({item.advantage for item in batch.rows if item.rollout_id == owner}) == 1


def test_mean_reward_is_over_valid_rollouts() -> None:
    assert mean_reward([settled(0, 0, 1.0), settled(0, 1, 0.0), settled(0, 2, 9.0, "masked")]) == 0.5
