"""Group-relative advantages. Golden numbers computed by hand from NeMo-RL's formulas."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.advantages import group_advantages


def advantages(
    rewards: list[float], valid: list[bool] | None = None, *, leave_one_out: bool = True, normalize: bool = True
) -> list[float]:
    valid = [True] * len(rewards) if valid is None else valid
    return group_advantages(rewards, valid, leave_one_out=leave_one_out, normalize=normalize, std_epsilon=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0], [1, -1]),
        ([1, 1, 0, 0], [1.154699, 1.154699, -1.154699, -1.154699]),
        ([1, 0, 0, 0], [1.0, -0.577349, -0.577349, -0.577349]),
        ([1, 1, 1, 0], [0.577349, 0.577349, 0.577349, -1.0]),
        ([1, 0, 0.5], [2.121314, -2.121314, 0]),
        ([0.5, 0, 1, 0.25], [0.160128, -1.527521, 2.999988, -0.499999]),
        ([0.7, 0.7, 0.7], [0, 0, 0]),
        ([1], [0]),
    ],
)
def test_golden_numbers_with_leave_one_out(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0], [0.707106, -0.707106]),
        ([1, 1, 0, 0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
    ],
)
def test_golden_numbers_with_the_group_mean(rewards: list[float], expected: list[float]) -> None:
    assert advantages(rewards, leave_one_out=False) == pytest.approx(expected, abs=2e-6)


def test_without_normalisation_the_advantage_is_the_distance_to_the_baseline() -> None:
    assert advantages([1, 1, 0, 0], normalize=False) == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3])


def test_a_masked_sibling_does_not_move_the_baseline() -> None:
    result = advantages([1, 0, 1, 0], [True, True, True, False])

    assert result == pytest.approx([0.707106, -1.0, 0.707106, 0.0], abs=2e-6)


def test_the_only_valid_rollout_has_nothing_to_compare_with() -> None:
    assert advantages([0, 1], [False, True]) == [0.0, 0.0]


def test_a_group_without_valid_rollouts_has_no_advantages() -> None:
    assert advantages([1, 0, 3], [False] * 3) == [0.0] * 3


def test_a_larger_epsilon_keeps_nearly_equal_groups_from_shouting() -> None:
    quiet = group_advantages([1, 0.99, 1], [True] * 3, leave_one_out=True, normalize=True, std_epsilon=0.1)

    assert max(map(abs, quiet)) < 0.2 < max(map(abs, advantages([1, 0.99, 1])))


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards but 1 valid flags"):
        group_advantages([1, 0], [True], leave_one_out=True, normalize=True, std_epsilon=1e-6)


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        advantages([math.nan, 1.0])


rewards_and_flags = st.lists(
    st.tuples(st.floats(-10, 10).map(lambda value: round(value, 3)), st.booleans()), min_size=1, max_size=12
)


@given(rewards_and_flags, st.floats(-100, 100), st.booleans(), st.booleans())
def test_an_invalid_reward_never_changes_anything(
    group: list[tuple[float, bool]], other: float, leave_one_out: bool, normalize: bool
) -> None:
    valid = [counts for _, counts in group]
    changed = [reward if counts else other for reward, counts in group]
    options = {"leave_one_out": leave_one_out, "normalize": normalize}

    result = advantages([reward for reward, _ in group], valid, **options)

    assert result == advantages(changed, valid, **options)
    assert all(value == 0.0 for value, counts in zip(result, valid, strict=True) if not counts)


@given(rewards_and_flags, st.booleans())
def test_without_normalisation_advantages_add_to_zero(group: list[tuple[float, bool]], leave_one_out: bool) -> None:
    rewards, valid = [reward for reward, _ in group], [counts for _, counts in group]

    result = advantages(rewards, valid, leave_one_out=leave_one_out, normalize=False)

    assert math.fsum(result) == pytest.approx(0, abs=1e-9)


@given(rewards_and_flags.flatmap(lambda group: st.tuples(st.just(group), st.permutations(range(len(group))))))
def test_the_order_of_rollouts_does_not_matter(case: tuple[list[tuple[float, bool]], list[int]]) -> None:
    group, order = case
    plain = advantages([reward for reward, _ in group], [counts for _, counts in group])
    shuffled = advantages([group[i][0] for i in order], [group[i][1] for i in order])

    assert shuffled == pytest.approx([plain[i] for i in order], rel=1e-12, abs=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=10), st.booleans())
def test_a_better_reward_never_has_a_smaller_raw_advantage(rewards: list[float], leave_one_out: bool) -> None:
    result = advantages(rewards, leave_one_out=leave_one_out, normalize=False)
    ranked = [advantage for _, advantage in sorted(zip(rewards, result, strict=True))]

    assert all(low <= high + 1e-9 for low, high in pairwise(ranked))
