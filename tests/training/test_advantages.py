"""Group-relative advantages: what holds of any group. Their golden numbers are in test_golden_numbers.py."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.advantages import clipped_advantage, group_advantages, shaped_reward


def advantages(
    rewards: list[float], valid: list[bool] | None = None, *, leave_one_out: bool = True, normalize: bool = True
) -> list[float]:
    valid = [True] * len(rewards) if valid is None else valid
    return group_advantages(rewards, valid, leave_one_out=leave_one_out, normalize=normalize, std_epsilon=1e-6)


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


@given(st.floats(-20, 20), st.floats(-5, 0) | st.none(), st.floats(0, 5) | st.none())
def test_a_clipped_advantage_is_within_its_bounds_and_never_changes_sign(
    advantage: float, lowest: float | None, highest: float | None
) -> None:
    result = clipped_advantage(advantage, lowest, highest)

    assert lowest is None or result >= lowest
    assert highest is None or result <= highest
    assert result * advantage >= 0
    assert result in (advantage, lowest, highest)
    assert clipped_advantage(0.0, lowest, highest) == 0.0


@pytest.mark.parametrize(
    ("truncated", "coefficient", "expected"), [(True, 0.5, 0.4), (True, None, 0.8), (False, 0.5, 0.8), (True, 0.0, 0.0)]
)
def test_only_the_reward_of_a_truncated_rollout_is_shaped(
    truncated: bool, coefficient: float | None, expected: float
) -> None:
    assert shaped_reward(0.8, truncated, coefficient) == expected
