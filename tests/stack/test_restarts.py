"""Back-off of services that keep failing."""

from hypothesis import given
from hypothesis import strategies as st

from workers.stack.restarts import RestartPolicy

POLICY = RestartPolicy()


def test_the_wait_doubles_from_one_second_to_thirty() -> None:
    assert [POLICY.wait_s(failures) for failures in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@given(failures=st.integers(1, 10_000))
def test_the_wait_never_shrinks_and_is_bounded(failures: int) -> None:
    assert 0 < POLICY.wait_s(failures) <= POLICY.wait_s(failures + 1) <= POLICY.longest_wait_s


def test_a_minute_of_health_forgets_earlier_failures() -> None:
    assert POLICY.failures_after(7, ready_s=60.0) == 1
    assert POLICY.failures_after(7, ready_s=59.9) == 8


def test_a_service_that_never_was_ready_is_given_up_sooner() -> None:
    assert [POLICY.gives_up(failures, was_ready=False) for failures in (2, 3)] == [False, True]
    assert [POLICY.gives_up(failures, was_ready=True) for failures in (19, 20)] == [False, True]
