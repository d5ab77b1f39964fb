"""Sampling ahead, as pure rules: which steps may begin, what they may be sampled by, how old that is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflows.lookahead import may_begin, newest_version, staleness, steps_to_begin, versions_of

LAST = 1000


def test_with_a_lookahead_of_one_the_step_after_next_waits_for_the_next_version() -> None:
    assert [may_begin(step, version=0, lookahead=1) for step in (0, 1, 2)] == [True, True, False]
    assert may_begin(2, version=1, lookahead=1)
    assert [may_begin(step, version=0, lookahead=0) for step in (0, 1)] == [True, False]


def test_groups_in_flight_or_ready_are_bounded() -> None:
    prompts = 4
    begun = [steps_to_begin(newest=-1, version=0, lookahead=ahead, last_step=LAST) for ahead in (1, 0)]
    assert [prompts * len(steps) for steps in begun] == [2 * prompts, prompts]


def test_a_resumed_run_goes_on_with_its_next_step() -> None:
    assert steps_to_begin(newest=9, version=10, lookahead=0, last_step=LAST) == [10]
    assert steps_to_begin(newest=9, version=10, lookahead=2, last_step=LAST) == [10, 11, 12]


def test_nothing_begins_after_the_last_step() -> None:
    assert steps_to_begin(newest=3, version=4, lookahead=3, last_step=5) == [4, 5]
    assert not steps_to_begin(newest=5, version=5, lookahead=3, last_step=5)


def test_versions_that_may_sample_for_a_step() -> None:
    assert [version in versions_of(5, lookahead=1) for version in (3, 4, 5, 6)] == [False, True, True, False]
    assert list(versions_of(0, lookahead=3)) == [0]


def test_on_policy_a_group_is_sampled_by_the_version_that_it_begins_with_alone() -> None:
    assert (newest_version(7, lookahead=0), newest_version(7, lookahead=2)) == (None, 7)


def test_staleness_is_what_groups_are_older_than_the_policy_they_train() -> None:
    ages = staleness(5, [5, 4, 4, 3, None], lookahead=1)
    assert ages == {"mean": 1.0, "max": 2.0, "stale": 1.0}
    assert staleness(5, [], lookahead=1) == {"mean": 0.0, "max": 0.0, "stale": 0.0}


@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 12), st.lists(st.sampled_from(["begin", "apply"])))
def test_no_step_is_skipped_or_begun_twice_and_the_buffer_never_overflows(
    lookahead: int, first: int, more: int, events: list[str]
) -> None:
    """Whatever the order of admissions and optimizer steps; at the end both happen until the run is over."""
    version, last, begun = first, first + more, list[int]()
    for event in [*events, *["begin", "apply"] * (more + 1) * (lookahead + 1)]:
        newest = begun[-1] if begun else first - 1
        if event == "begin":
            for step in steps_to_begin(newest, version, lookahead, last)[:1]:
                assert may_begin(step, version, lookahead)
                assert version in versions_of(step, lookahead)
                begun.append(step)
        elif newest >= version:
            version += 1
        in_flight = [step for step in begun if step >= version]
        assert len(in_flight) <= lookahead + 1
    assert (begun, version) == (list(range(first, last + 1)), last + 1)


@given(st.integers(0, 100), st.integers(0, 5))
def test_a_step_may_begin_at_exactly_the_versions_that_may_sample_for_it(step: int, lookahead: int) -> None:
    allowed = versions_of(step, lookahead)
    assert [v for v in range(step + 1) if may_begin(step, v, lookahead)] == list(allowed)
    assert allowed[-1] == step


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_the_oldest_allowed_group_is_not_stale(lookahead: int) -> None:
    assert staleness(9, [9 - lookahead], lookahead)["stale"] == 0
    assert staleness(9, [8 - lookahead], lookahead)["stale"] == 1
