"""The rules of the safe."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gym.safe.game import BAD_CALL, CODES, DIALS, STOPPED, TURNS, Safe, code_of, prompt_of

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dial", "digit", "x"]), inner),
    max_leaves=5,
)


def test_seeds_give_every_code_once() -> None:
    codes = Counter(code_of(seed) for seed in range(CODES))
    assert len(codes) == CODES
    assert set(codes.values()) == {1}
    assert code_of(CODES + 5) == code_of(5)
    assert all(1 <= digit <= 9 for code in codes for digit in code)


def test_the_same_seed_is_the_same_safe() -> None:
    assert (code_of(42), prompt_of(42)) == (code_of(42), prompt_of(42))
    assert prompt_of(42) != prompt_of(43)


def test_hints_point_to_the_hidden_digit() -> None:
    safe = Safe(seed=0)
    hidden = safe.code[1]
    for digit in range(1, 10):
        hint = "open" if digit == hidden else "higher" if digit < hidden else "lower"
        assert Safe(seed=0).turn({"dial": 2, "digit": digit}) == f'{{"hint": "{hint}"}}'


def test_reward_is_the_share_of_open_dials() -> None:
    safe = Safe(seed=7)
    rewards = []
    for dial, digit in enumerate(safe.code, start=1):
        rewards.append(safe.reward)
        safe.turn({"dial": dial, "digit": digit})
    assert [*rewards, safe.reward] == [0, 1 / 3, 2 / 3, 1]
    assert safe.turn({"dial": 1, "digit": 1}) == STOPPED
    assert safe.turns_left == TURNS - DIALS


def test_opening_a_dial_twice_counts_once() -> None:
    safe = Safe(seed=7)
    for _ in range(2):
        safe.turn({"dial": 1, "digit": safe.code[0]})
    assert safe.reward == 1 / 3


def test_the_last_turn_says_so_and_then_nothing_moves() -> None:
    safe = Safe(seed=1)
    wrong = {"dial": 1, "digit": safe.code[0] % 9 + 1}
    outputs = [safe.turn(wrong) for _ in range(TURNS)]
    assert [output.endswith('"left": 0}') for output in outputs] == [False] * (TURNS - 1) + [True]
    assert safe.turn({"dial": 1, "digit": safe.code[0]}) == STOPPED
    assert safe.reward == 0


@pytest.mark.parametrize(
    "arguments",
    [None, [], "x", {}, {"dial": 1}, {"dial": "1", "digit": 2}, {"dial": True, "digit": 1}, {"dial": 4, "digit": 1}],
)
def test_a_bad_call_costs_a_turn(arguments: object) -> None:
    safe = Safe(seed=1)
    assert safe.turn(arguments) == BAD_CALL
    assert safe.turns_left == TURNS - 1


@given(calls=st.lists(anything, max_size=12), seed=st.integers(0, 10_000))
def test_no_call_breaks_the_safe(calls: list[object], seed: int) -> None:
    safe = Safe(seed)
    for call in calls:
        safe.turn(call)
    assert safe.turns_left == max(0, TURNS - len(calls)) or safe.reward == 1
    assert 0 <= safe.reward <= 1
