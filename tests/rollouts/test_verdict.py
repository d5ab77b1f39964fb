"""What an answer says of its own worth: each combination of reward, mask and failure, and who has to deal with it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.errors import BoundaryError, EnvironmentFailed, EnvironmentRefused, IntegrityError, failure_of
from activities.rollouts.failure_kinds import BUCKETS
from activities.rollouts.verdict import Verdict, failure_of_episode, verdict

INFRA = sorted(kind for kind, bucket in BUCKETS.items() if bucket == "infra")
DATA = sorted(kind for kind, bucket in BUCKETS.items() if bucket == "data")
FOREIGN = ["usersim:scorer_inconclusive", "timeout_exceeded", "Some Words", "x" * 500]


def raised(answer: dict[str, Any]) -> BoundaryError:
    with pytest.raises((EnvironmentFailed, EnvironmentRefused, IntegrityError)) as caught:
        verdict(answer)
    return caught.value


def test_an_answer_without_a_word_counts() -> None:
    said: dict[str, Any] = {"mask_sample": False, "failure_kind": None, "failure_reason": None}
    assert verdict({"reward": 0.0, **said}) == Verdict(0.0)
    assert verdict({"reward": 1}) == Verdict(1.0)


@pytest.mark.parametrize("kind", INFRA)
@pytest.mark.parametrize(
    "beside",
    [
        {"reward": 0.0, "mask_sample": True},
        {"reward": 0.7, "instance_config": {"mask_sample": True}},
        {"reward": 0.5, "verification_skipped": True},
        {"reward": None},
        {"reward": 0.0, "mask_sample": False},
    ],
    ids=["masked", "masked as before", "not verified", "no reward", "a reward of 0"],
)
def test_the_infrastructure_failed_and_another_attempt_may_measure(kind: str, beside: dict[str, Any]) -> None:
    error = raised({"failure_kind": kind, "failure_reason": "it is away", **beside})
    assert isinstance(error, EnvironmentFailed)
    failure = failure_of(error, boundary="ledger", run_id="r")
    assert (failure.boundary, failure.bucket) == ("environment", "infra")
    assert (failure.failure_class, failure.cause) == (kind, "it is away")


@pytest.mark.parametrize("kind", [*INFRA, *DATA, *FOREIGN])
def test_a_reward_that_was_earned_in_spite_of_a_failure_counts(kind: str) -> None:
    answer = {"reward": 0.25, "failure_kind": kind, "failure_reason": "a shard was slow"}
    assert verdict(answer) == Verdict(0.25, remark=f"{kind}: a shard was slow")


@pytest.mark.parametrize("kind", [*DATA, *FOREIGN])
def test_a_reward_of_zero_counts_where_the_infrastructure_is_not_to_blame(kind: str) -> None:
    assert verdict({"reward": 0.0, "failure_kind": kind}) == Verdict(0.0, remark=kind)


@pytest.mark.parametrize("kind", [*DATA, *FOREIGN])
@pytest.mark.parametrize("reward", [0.5, None])
def test_a_mask_that_no_attempt_can_lift_begins_with_the_kind(kind: str, reward: float | None) -> None:
    answer = {"reward": reward, "mask_sample": True, "failure_kind": kind, "failure_reason": "no\nnumber"}
    assert verdict(answer) == Verdict(reward, masked=f"{kind}: no number")


def test_a_mask_without_a_kind_says_what_it_can() -> None:
    assert verdict({"reward": 0.0, "mask_sample": True}).masked == "environment_masked"
    assert verdict({"reward": 0.0, "mask_sample": True, "failure_reason": "broken"}).masked == "broken"
    assert verdict({"reward": 0.0, "mask_sample": True, "failure_kind": "judge_unparseable"}).masked == (
        "judge_unparseable"
    )


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_reward_that_nobody_verified_is_masked(reward: float) -> None:
    masked = verdict({"reward": reward, "verification_skipped": True}).masked
    assert (masked or "").startswith("verification_skipped: ")
    assert verdict({"reward": reward, "verification_skipped": False}) == Verdict(reward)


@pytest.mark.parametrize("kind", [*DATA, *FOREIGN])
def test_no_reward_for_a_reason_that_stays_is_a_data_failure(kind: str) -> None:
    error = raised({"failure_kind": kind, "failure_reason": "nothing to score"})
    assert isinstance(error, EnvironmentRefused)
    assert error.bucket == "data"
    assert kind in (error.failure_class, str(error).removesuffix(": nothing to score"))


def test_no_reward_and_no_reason_is_a_contradiction() -> None:
    assert isinstance(raised({}), IntegrityError)
    assert isinstance(raised({"reward": None, "failure_kind": "", "failure_reason": None}), IntegrityError)


@pytest.mark.parametrize(
    ("terminal", "bucket"),
    [({}, "infra"), ({"_ng_failure_terminal": False}, "infra"), ({"_ng_failure_terminal": True}, "data")],
)
def test_failures_of_older_servers_are_never_a_sample(terminal: dict[str, Any], bucket: str) -> None:
    answer = {"reward": 0.0, "_ng_failure_class": "timeout_exceeded", "error": "600 s are over", **terminal}
    error = raised(answer)
    assert (error.failure_class, error.bucket, str(error)) == ("timeout_exceeded", bucket, "600 s are over")


def test_the_answer_of_a_lost_judge_as_nemo_gym_gives_it_is_retried() -> None:
    answer = {
        "reward": 0.0,
        "mask_sample": True,
        "failure_kind": "judge_failed",
        "failure_reason": "503",
        "instance_config": {"mask_sample": True},
        "_ng_failure_class": "judge_failed",
        "_ng_failure_judge_error": "503",
    }
    error = raised(answer)
    assert (type(error), error.failure_class, str(error)) == (EnvironmentFailed, "judge_failed", "503")


@pytest.mark.parametrize(
    "kind", [17, ["judge_failed"], {"a": 1}, "Judge failed!", "judge_failed\n", "a:b:c", "x" * 101]
)
def test_what_is_no_name_is_told_but_names_no_class(kind: Any) -> None:
    error = failure_of_episode({"failure_kind": kind, "failure_reason": "why", "terminal": False})
    assert error.failure_class == "EnvironmentFailed"
    assert str(error).endswith(": why")


@pytest.mark.parametrize(
    ("terminal", "kind", "name", "bucket"),
    [
        (False, None, "EnvironmentFailed", "infra"),
        (True, None, "EnvironmentRefused", "data"),
        (False, "judge_unparseable", "judge_unparseable", "infra"),
        (True, "provider_unavailable", "provider_unavailable", "data"),
        (True, "usersim:bad_persona", "usersim:bad_persona", "data"),
    ],
)
def test_an_episode_s_failure_says_itself_whether_it_may_pass(
    terminal: bool, kind: str | None, name: str, bucket: str
) -> None:
    error = failure_of_episode({"failure_reason": "late", "terminal": terminal, "failure_kind": kind, "stage": "seed"})
    failure = failure_of(error, boundary="ledger", run_id="r")
    assert (failure.failure_class, failure.bucket, failure.boundary) == (name, bucket, "environment")
    assert failure.cause == "stage seed: late"


def test_an_episode_s_failure_without_a_word_is_named_all_the_same() -> None:
    assert str(failure_of_episode({})) == "no reason is given"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*BUCKETS, *FOREIGN]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    "reward",
    "mask_sample",
    "failure_kind",
    "failure_reason",
    "verification_skipped",
    "instance_config",
    "_ng_failure_class",
    "_ng_failure_terminal",
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_answer_is_worth_something_or_an_error_that_says_why(answer: dict[str, Any]) -> None:
    worth = attempted(answer)
    if isinstance(worth, BoundaryError):
        failure = failure_of(worth, boundary="ledger", run_id="r")
        assert failure.cause
        assert len(failure.failure_class) <= 100
    else:
        assert worth.reward is not None or worth.masked
        assert not answer.get("_ng_failure_class")
        assert worth.masked or not (answer.get("mask_sample") or answer.get("verification_skipped"))


def attempted(answer: dict[str, Any]) -> Verdict | BoundaryError:
    try:
        return verdict(answer)
    except BoundaryError as error:
        return error
