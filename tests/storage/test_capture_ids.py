"""Capture ids: every attempt has one of its own, and it is read back exactly."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.capture_ids import capture_id, parse_capture_id

part = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,20}", fullmatch=True)
rollout_ids = st.builds(
    lambda run, step, slot, index: f"{run}/step-{step}/group-{slot}/rollout-{index}",
    part,
    st.integers(0, 10**6),
    st.integers(0, 10**4),
    st.integers(0, 10**4),
)


@given(rollout_ids, st.integers(0, 10**6))
def test_rollout_and_attempt_are_read_back(rollout_id: str, attempt: int) -> None:
    text = capture_id(rollout_id, attempt)

    assert parse_capture_id(text) == (rollout_id, attempt)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", text)


@given(rollout_ids)
def test_id_of_the_first_attempt_does_not_read_like_that_of_a_later_one(rollout_id: str) -> None:
    assert not re.search(r"-a[0-9]+$", capture_id(rollout_id))


@given(rollout_ids, rollout_ids, st.integers(0, 20), st.integers(0, 20))
def test_two_attempts_never_share_an_id(one: str, other: str, attempt: int, later: int) -> None:
    if (one, attempt) != (other, later):
        assert capture_id(one, attempt) != capture_id(other, later)


def test_form_is_the_one_that_nemo_gym_extends() -> None:
    assert capture_id("run-1/step-0/group-2/rollout-3") == "run-1.step-0.group-2.rollout-3"
    assert capture_id("run-a1/step-0/group-2/rollout-3", 4) == "run-a1.step-0.group-2.rollout-3-a4"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rollout-0",
        "run.step-0.group-0",
        "run.step-0.group-0.rollout-0-a0",
        "run.step-0.group-0.rollout-0-a01",
        "run.step-0.group-0.rollout-00",
        "run..rollout-0",
        "run/step-0/group-0/rollout-0",
        "run.step-0.group-0.rollout-0 ",
        "7-3",
    ],
)
def test_other_texts_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_capture_id(text)


@pytest.mark.parametrize("rollout_id", ["run.1/rollout-0", "run/rollout-0-a1", "rollout-0", "run/rollout-x"])
def test_rollout_id_that_could_not_be_read_back_is_refused(rollout_id: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(rollout_id))):
        capture_id(rollout_id)
