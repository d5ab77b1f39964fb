"""Drop budgets and the step floor."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.failure import FailureConfig, floor_of
from tests.workflows.counting import counted
from workflows.budgets import BelowFloor, BudgetExhausted, check_budgets, check_floor
from workflows.messages import Bucket, BudgetState, GroupResult

KEPT, INFRA, DATA, NOBODY = "kept", "infra", "data", "nobody"
endings = st.lists(st.sampled_from([KEPT, INFRA, DATA, NOBODY]), max_size=40)


def ended(how: str, budgets: BudgetState | None = None) -> GroupResult:
    """A group that ended: kept, or dropped for infrastructure, for its content, or by an operator."""
    bucket: dict[str, Bucket | None] = {INFRA: "infra", DATA: "data"}
    return GroupResult(
        group_id="r/step-0/group-0",
        slot=0,
        prompt_id="p",
        state="sealed" if how == KEPT else "dropped",
        valid=0,
        masked=0,
        lost=1,
        bucket=bucket.get(how),
        budgets=budgets or BudgetState(),
    )


def counters(*sequence: str) -> list[BudgetState]:
    """The counters after each end, in completion order."""
    states = [BudgetState()]
    for how in sequence:
        states.append(counted(states[-1], ended(how)))
    return states[1:]


def first_exhausted(failure: FailureConfig, *sequence: str) -> int | None:
    """Index of the group that ends the run; None: none does."""
    for index, (how, budgets) in enumerate(zip(sequence, counters(*sequence), strict=True)):
        try:
            check_budgets("r", ended(how, budgets), failure)
        except BudgetExhausted:
            return index
    return None


def test_consecutive_drops_count_until_a_group_is_kept() -> None:
    sequence = (INFRA, INFRA, KEPT, INFRA, INFRA, INFRA)
    assert [state.consecutive_drops for state in counters(*sequence)] == [1, 2, 0, 1, 2, 3]
    assert first_exhausted(FailureConfig(max_consecutive_dropped_prompts=2), *sequence) == 5


def test_without_a_budget_the_first_drop_ends_the_run() -> None:
    assert first_exhausted(FailureConfig(), INFRA) == 0
    assert first_exhausted(FailureConfig(), DATA) == 0


def test_a_data_drop_between_infrastructure_drops_leaves_their_counter() -> None:
    assert [state.consecutive_drops for state in counters(INFRA, DATA, INFRA)] == [1, 1, 2]
    failure = FailureConfig(max_consecutive_dropped_prompts=1, max_skipped_prompts=1)
    assert first_exhausted(failure, INFRA, DATA, INFRA) == 2


def test_skipped_prompts_never_come_back() -> None:
    sequence = (DATA, KEPT, DATA, KEPT, DATA)
    assert [state.skipped_prompts for state in counters(*sequence)] == [1, 1, 2, 2, 3]
    assert first_exhausted(FailureConfig(max_skipped_prompts=2), *sequence) == 4


def test_a_group_that_an_operator_dropped_counts_nowhere() -> None:
    assert counters(NOBODY, NOBODY) == [BudgetState(), BudgetState()]
    assert first_exhausted(FailureConfig(), NOBODY, NOBODY) is None


def test_the_errors_say_the_numbers_and_what_to_change() -> None:
    with pytest.raises(BudgetExhausted) as consecutive:
        check_budgets(
            "r", ended(INFRA, BudgetState(consecutive_drops=3)), FailureConfig(max_consecutive_dropped_prompts=2)
        )
    assert str(consecutive.value) == (
        "3 prompt groups in a row were dropped for infrastructure failures, exceeding "
        "failure.max_consecutive_dropped_prompts=2"
    )
    assert "onbelay run resume r failure.max_consecutive_dropped_prompts=3" in consecutive.value.remedy
    with pytest.raises(BudgetExhausted) as skipped:
        check_budgets("r", ended(DATA, BudgetState(skipped_prompts=3)), FailureConfig(max_skipped_prompts=2))
    assert str(skipped.value) == (
        "skipped 2 prompts and this one also exhausted its data budget, exceeding failure.max_skipped_prompts=2"
    )
    assert "onbelay run resume r failure.max_skipped_prompts=3" in skipped.value.remedy


def test_drops_of_one_step_between_commits_of_another_never_use_up_the_consecutive_budget() -> None:
    failure = FailureConfig(max_consecutive_dropped_prompts=1, min_step_batch_fraction=0.5)
    assert first_exhausted(failure, *[INFRA, KEPT] * 20) is None
    check_floor("r", step=3, prompts=4, lost=2, failure=failure)
    with pytest.raises(BelowFloor):
        check_floor("r", step=3, prompts=4, lost=3, failure=failure)


@given(endings, st.integers(0, 5), st.integers(0, 5))
def test_a_run_ends_at_exactly_the_first_drop_that_no_budget_covers(
    sequence: list[str], consecutive: int, skipped: int
) -> None:
    in_a_row = data = 0
    expected = None
    for index, how in enumerate(sequence):
        in_a_row = {KEPT: 0, INFRA: in_a_row + 1}.get(how, in_a_row)
        data += how == DATA
        if expected is None and ((how == INFRA and in_a_row > consecutive) or (how == DATA and data > skipped)):
            expected = index
    failure = FailureConfig(max_consecutive_dropped_prompts=consecutive, max_skipped_prompts=skipped)
    assert first_exhausted(failure, *sequence) == expected


@pytest.mark.parametrize(
    ("prompts", "floor", "may_be_lost"),
    [
        *((4, 4, 0), (8, 8, 0), (9, 9, 0), (10, 9, 1), (16, 15, 1)),
        *((20, 18, 2), (32, 29, 3), (64, 58, 6), (128, 116, 12)),
    ],
)
def test_floor_at_nine_tenths(prompts: int, floor: int, may_be_lost: int) -> None:
    assert floor_of(prompts, 0.9) == floor
    check_floor("r", step=0, prompts=prompts, lost=may_be_lost, failure=FailureConfig())
    with pytest.raises(BelowFloor):
        check_floor("r", step=0, prompts=prompts, lost=may_be_lost + 1, failure=FailureConfig())


def test_floor_is_the_float_product_rounded_up() -> None:
    assert floor_of(4, 0.75) == 3
    assert floor_of(100, 0.07) == 8  # 7.000000000000001 in floats
    assert floor_of(7, 1) == 7


def test_a_step_at_its_floor_trains_and_one_below_ends_the_run() -> None:
    failure = FailureConfig(min_step_batch_fraction=0.75)
    check_floor("r", step=7, prompts=4, lost=1, failure=failure)
    with pytest.raises(
        BelowFloor,
        match=r"training step 7 lost 2 of 4 prompt group\(s\), leaving 2, below the floor of 3 .*=0.75",
    ) as below:
        check_floor("r", step=7, prompts=4, lost=2, failure=failure)
    assert "onbelay run resume r failure.min_step_batch_fraction=0.5" in below.value.remedy
    assert "failure.on_dropped_prompt=replace or park" in below.value.remedy


def test_a_step_that_lost_everything_is_not_told_to_lower_its_floor() -> None:
    with pytest.raises(BelowFloor) as below:
        check_floor("r", step=0, prompts=2, lost=2, failure=FailureConfig())
    assert "min_step_batch_fraction" not in below.value.remedy
    assert "onbelay run resume r" in below.value.remedy


def test_the_floor_holds_even_while_drop_budgets_last() -> None:
    failure = FailureConfig(max_consecutive_dropped_prompts=5, min_step_batch_fraction=1)
    with pytest.raises(BelowFloor, match="leaving 3, below the floor of 4"):
        check_floor("r", step=0, prompts=4, lost=1, failure=failure)


@given(st.integers(1, 512), st.floats(0.001, 1))
def test_a_floor_asks_for_at_least_one_group_and_for_no_more_than_there_are(prompts: int, fraction: float) -> None:
    assert 1 <= floor_of(prompts, fraction) <= prompts


@given(st.integers(1, 200), st.integers(0, 200), st.floats(0.01, 1))
def test_the_floor_that_an_error_proposes_lets_the_step_train(prompts: int, lost: int, fraction: float) -> None:
    lost = min(lost, prompts)
    failure = FailureConfig(min_step_batch_fraction=fraction)
    try:
        check_floor("r", 0, prompts, lost, failure)
    except BelowFloor as error:
        proposed = re.search(r"min_step_batch_fraction=([0-9.]+)", error.remedy)
        assert (proposed is None) == (100 * (prompts - lost) < prompts)
        if proposed:
            lower = FailureConfig(min_step_batch_fraction=float(proposed.group(1)))
            check_floor("r", 0, prompts, lost, lower)
