"""Retry budgets of a rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.failure import FailureConfig
from tests.workflows.test_failures import FAILURE
from workflows.attempts import MAX_HANDOVERS, AttemptBudget
from workflows.failures import HANDED_OVER, POLICY_MISMATCH
from workflows.messages import Bucket, Failure

DEFAULTS = FailureConfig()
BUCKETS: dict[str, Bucket] = {"I": "infra", "D": "data"}


def attempts_until_lost(failures: str, failure: FailureConfig = DEFAULTS) -> int | None:
    """The attempt at which a rollout with these failures (I or D each) is lost."""
    budget = AttemptBudget()
    for attempt, letter in enumerate(failures, start=1):
        budget = budget.after(BUCKETS[letter])
        if budget.is_exhausted(failure):
            return attempt
    return None


@pytest.mark.parametrize(
    ("failures", "lost_at"),
    [("IIIII", 5), ("DD", 2), ("DIIIID", 6), ("IIIIDI", 6), ("IIII", None), ("D", None), ("IIIID", None)],
)
def test_each_bucket_has_its_own_budget(failures: str, lost_at: int | None) -> None:
    assert attempts_until_lost(failures) == lost_at


def test_back_off_doubles_up_to_its_cap() -> None:
    budget, waits = AttemptBudget(), list[float]()
    for _ in range(7):
        waits.append(budget.next_backoff_s(DEFAULTS))
        budget = budget.after("infra")
    assert waits == [1, 2, 4, 8, 16, 30, 30]


def test_a_data_failure_does_not_start_the_back_off_over() -> None:
    assert AttemptBudget().after("infra", 2).after("data").next_backoff_s(DEFAULTS) == 4


@given(st.text("ID", max_size=60), st.integers(1, 20), st.integers(1, 20))
def test_no_rollout_has_more_attempts_than_both_budgets_allow(failures: str, infra: int, data: int) -> None:
    failure = FailureConfig(max_infra_attempts_per_prompt=infra, max_data_attempts_per_prompt=data)
    lost_at = attempts_until_lost(failures, failure)
    if lost_at is None:
        assert failures.count("I") < infra
        assert failures.count("D") < data
    else:
        assert lost_at <= infra + data - 1


@given(st.integers(0, 10**6), st.floats(0.001, 10), st.floats(10, 1000))
def test_back_off_stays_between_its_base_and_its_cap(failures: int, base: float, cap: float) -> None:
    failure = FailureConfig(backoff_base_s=base, max_backoff_s=cap)
    assert base <= AttemptBudget(infra_failures=failures).next_backoff_s(failure) <= cap


def failed(failure_class: str, bucket: Bucket, retries: int = 0, *, final: bool = False) -> Failure:
    """How an activity ended, after so many infrastructure failures."""
    return FAILURE.model_copy(
        update={"failure_class": failure_class, "bucket": bucket, "retries": retries, "final": final}
    )


@pytest.mark.parametrize(
    ("failure", "infra", "data", "handovers"),
    [
        (failed("AgentFailed", "infra", 3), 5, 0, 0),
        (failed("IntegrityError", "data", 3), 3, 1, 0),
        (failed(HANDED_OVER, "infra", 3), 3, 0, 1),
        (failed(HANDED_OVER, "infra", 3, final=True), 4, 0, 0),
        (failed(POLICY_MISMATCH, "infra", 3), 4, 0, 0),
    ],
    ids=["Temporal spent the budget", "data", "handed over", "handed over, but may run once", "not healed"],
)
def test_an_activity_s_end_is_charged_with_the_failures_before_it(
    failure: Failure, infra: int, data: int, handovers: int
) -> None:
    budget = AttemptBudget().charged(failure, DEFAULTS)
    assert (budget.infra_failures, budget.data_failures, budget.handovers) == (infra, data, handovers)


def test_hand_overs_are_free_a_bounded_number_of_times() -> None:
    budget = AttemptBudget()
    for _ in range(MAX_HANDOVERS):
        assert budget.is_handover(failed(HANDED_OVER, "infra"))
        budget = budget.charged(failed(HANDED_OVER, "infra"), DEFAULTS)
    assert (budget.infra_failures, budget.handovers) == (0, MAX_HANDOVERS)
    assert not budget.is_handover(failed(HANDED_OVER, "infra"))
    assert budget.charged(failed(HANDED_OVER, "infra"), DEFAULTS).infra_failures == 1


@given(
    st.lists(st.sampled_from([(HANDED_OVER, "infra"), (POLICY_MISMATCH, "infra"), ("X", "infra"), ("X", "data")])),
    st.lists(st.integers(0, 4)),
)
def test_no_failure_gives_anything_back(ends: list[tuple[str, Bucket]], retries: list[int]) -> None:
    budget = AttemptBudget()
    for (failure_class, bucket), before in zip(ends, retries, strict=False):
        if budget.is_exhausted(DEFAULTS):
            return
        # Temporal makes no more tries than the budget has.
        count = min(before, budget.infra_attempts_left(DEFAULTS) - 1)
        after = budget.charged(failed(failure_class, bucket, count), DEFAULTS)
        assert after.infra_failures >= budget.infra_failures + count
        assert after.data_failures == budget.data_failures + (bucket == "data")
        assert after.handovers == budget.handovers + (failure_class == HANDED_OVER)
        assert after != budget
        budget = after
