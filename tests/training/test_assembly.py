"""One advantage per rollout, copied to each of its rows; masked and lost rollouts never vote."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from activities.training.assembly import assemble, mean_reward
from activities.training.batch import BadBatch, TrainingBatch, placeholder
from activities.training.errors import EmptyBatch
from configs.grpo import GrpoConfig
from tests.training.rollouts import own_rows, row, settled

GRPO = GrpoConfig()


def test_rollout_in_two_segments_counts_once_and_lends_its_advantage_to_both() -> None:
    winner, loser = settled(0, 0, 1.0, segments=2), settled(0, 1, 0.0)
    rows = {winner.rollout_id: [row(winner, 0, 5), row(winner, 1, 3)], loser.rollout_id: [row(loser, 0, 2)]}
    batch = assemble("climb", 7, [winner, loser], rows, GRPO)
    assert [item.advantage for item in batch.rows] == [1.0, 1.0, -1.0]
    assert [(item.rollout_id, item.segment) for item in batch.rows] == [
        (winner.rollout_id, 0),
        (winner.rollout_id, 1),
        (loser.rollout_id, 0),
    ]
    assert (batch.run_id, batch.step, batch.rollouts, batch.trained_tokens) == ("climb", 7, 2, 10)


def test_masked_rollout_of_three_segments_keeps_its_place_with_one_row_that_trains_nothing() -> None:
    masked, valid = settled(0, 0, 1.0, "masked", segments=3), settled(0, 1, 1.0)
    batch = assemble("climb", 0, [masked, valid], own_rows([masked, valid]), GRPO)
    assert [item.rollout_id for item in batch.rows] == [masked.rollout_id, valid.rollout_id]
    assert (batch.rollouts, batch.trained_tokens) == (2, 1)
    kept = batch.rows[0]
    assert (kept.tokens.tolist(), kept.loss_mask.tolist(), kept.log_probs.tolist()) == ([0], [0], [0.0])
    assert (kept.advantage, kept.is_placeholder, batch.rows[1].is_placeholder) == (0.0, True, False)


def test_placeholders_change_neither_tokens_nor_loss() -> None:
    valid = [settled(0, index, reward) for index, reward in enumerate((1.0, 0.0))]
    gone = [settled(0, 2, None, "lost"), settled(0, 3, 1.0, "masked")]
    without = assemble("climb", 0, valid, own_rows(valid), GRPO)
    padded = assemble("climb", 0, [*valid, *gone], own_rows(valid), GRPO)
    assert padded.trained_tokens == without.trained_tokens
    assert [item.advantage for item in padded.rows] == [1.0, -1.0, 0.0, 0.0]
    assert TrainingBatch.from_bytes(padded.to_bytes()).rollouts == 4


def test_masked_rollout_leaves_baseline_and_deviation_alone() -> None:
    rollouts = [settled(0, 0, 1.0), settled(0, 1, 0.0), settled(0, 2, 1.0), settled(0, 3, 0.0, "masked")]
    batch = assemble("climb", 0, rollouts, own_rows(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == pytest.approx([0.707106, -1.0, 0.707106, 0.0], abs=1e-6)


def test_single_valid_rollout_has_no_advantage() -> None:
    rollouts = [settled(0, 0, 0.0, "masked"), settled(0, 1, 1.0)]
    batch = assemble("climb", 0, rollouts, own_rows(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == [0.0, 0.0]


def test_group_is_known_by_its_id_and_not_by_its_prompt() -> None:
    rollouts = [settled(0, 0, 1.0), settled(0, 1, 0.0), settled(1, 0, 1.0), settled(1, 1, 1.0)]
    batch = assemble("climb", 0, rollouts, own_rows(rollouts), GRPO)
    assert [item.advantage for item in batch.rows] == [1.0, -1.0, 0.0, 0.0]


def test_formula_is_that_of_the_recipe() -> None:
    rollouts = [settled(0, index, reward) for index, reward in enumerate((1.0, 1.0, 0.0, 0.0))]
    plain = GrpoConfig(use_leave_one_out_baseline=False, normalize_rewards=False)
    assert [item.advantage for item in assemble("climb", 0, rollouts, own_rows(rollouts), plain).rows] == [
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
    first = [settled(0, index, reward, state, segments=many) for index, (state, reward, many) in enumerate(outcomes)]
    second = [
        settled(0, index, reward if state == "valid" else others[index], state, segments=many)
        for index, (state, reward, many) in enumerate(outcomes)
    ]
    rows = own_rows(first, sampled=2)
    assume(rows)
    batch = assemble("climb", 0, first, rows, GRPO)
    assert batch.to_bytes() == assemble("climb", 0, second, dict(reversed(rows.items())), GRPO).to_bytes()
    assert {item.rollout_id for item in batch.rows if not item.is_placeholder} == set(rows)
    assert batch.rollouts == len(first)
    for owner in rows:
        assert len({item.advantage for item in batch.rows if item.rollout_id == owner}) == 1


def test_mean_reward_is_over_valid_rollouts() -> None:
    assert mean_reward([settled(0, 0, 1.0), settled(0, 1, 0.0), settled(0, 2, 9.0, "masked")]) == 0.5


def test_a_truncated_rollout_is_compared_by_a_part_of_its_reward() -> None:
    shaping = GrpoConfig.model_validate(
        {"normalize_rewards": False, "reward_shaping": {"stop_properly_penalty_coef": 0.25}}
    )
    rollouts = [settled(0, 0, 1.0, truncated=True), settled(0, 1, 1.0)]

    assert [one.advantage for one in assemble("climb", 0, rollouts, own_rows(rollouts), shaping).rows] == [-0.75, 0.75]
    assert [one.advantage for one in assemble("climb", 0, rollouts, own_rows(rollouts), GRPO).rows] == [0.0, 0.0]
    assert mean_reward(rollouts) == 1.0


def test_a_coefficient_of_zero_leaves_a_truncated_rollout_no_reward() -> None:
    shaping = GrpoConfig.model_validate({"reward_shaping": {"stop_properly_penalty_coef": 0.0}})
    rollouts = [settled(0, 0, 1.0, truncated=True), settled(0, 1, 0.0)]

    assert [one.advantage for one in assemble("climb", 0, rollouts, own_rows(rollouts), shaping).rows] == [0.0, 0.0]


def test_advantages_are_clipped_after_they_are_normalised() -> None:
    clipped = GrpoConfig(advantage_clip_low=-0.4, advantage_clip_high=0.9)
    rollouts = [settled(0, 0, 1.0), *(settled(0, index, 0.0) for index in (1, 2, 3)), settled(0, 4, None, "lost")]

    found = [one.advantage for one in assemble("climb", 0, rollouts, own_rows(rollouts), clipped).rows]

    assert found == [0.9, -0.4, -0.4, -0.4, 0.0]


def test_rows_come_in_the_order_of_groups_then_rollouts_then_segments() -> None:
    rollouts = [settled(5, 0, 1.0, segments=2), settled(5, 1, 0.0), settled(2, 0, 0.0), settled(2, 1, 1.0, segments=3)]

    batch = assemble("climb", 0, rollouts, own_rows(rollouts), GRPO)

    assert [(one.rollout_id.partition("group-")[2], one.segment) for one in batch.rows] == [
        *[("5/rollout-0", 0), ("5/rollout-0", 1), ("5/rollout-1", 0)],
        *[("2/rollout-0", 0), *[("2/rollout-1", segment) for segment in range(3)]],
    ]


def test_a_rollout_that_has_lost_a_segment_is_refused_by_name() -> None:
    whole = settled(0, 0, 1.0, segments=3)
    rows = {whole.rollout_id: [row(whole, 0), row(whole, 1)]}

    with pytest.raises(
        BadBatch, match=r"run climb: valid rollout climb/step-0/group-0/rollout-0 settled with 3 .*2 rows"
    ):
        assemble("climb", 0, [whole], rows, GRPO)
    with pytest.raises(BadBatch, match="0 rows"):
        assemble("climb", 0, [whole], {}, GRPO)


def test_rows_of_another_rollout_and_segments_without_sampled_tokens_are_refused() -> None:
    one, other = settled(0, 0, 1.0), settled(0, 1, 0.0)

    with pytest.raises(BadBatch, match=r"rollout-0: segment 0 of its evidence has another owner, .*rollout-1"):
        assemble("climb", 0, [one], {one.rollout_id: [row(other)]}, GRPO)
    with pytest.raises(BadBatch, match="rollout-0: segment 0 of its evidence has no sampled token"):
        assemble("climb", 0, [one], {one.rollout_id: [placeholder(one.rollout_id)]}, GRPO)


def test_segments_in_another_order_are_refused() -> None:
    one = settled(0, 0, 1.0, segments=2)

    with pytest.raises(BadBatch, match="rollout-0 segment 1 stands where segment 0 of this rollout belongs"):
        assemble("climb", 0, [one], {one.rollout_id: [row(one, 1), row(one, 0)]}, GRPO)


def test_a_step_without_a_trained_token_is_refused_by_name() -> None:
    unseen = settled(0, 0, 1.0)
    rows = {unseen.rollout_id: [row(unseen, prompt=0, sampled=1)]}

    for rollouts in ([settled(0, 0, 1.0, "masked"), settled(0, 1, None, "lost")], [unseen]):
        with pytest.raises(EmptyBatch, match=r"Step 3 of run climb: its 1 groups have \d rollouts and not one sampled"):
            assemble("climb", 3, rollouts, rows, GRPO)
