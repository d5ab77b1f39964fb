"""How a group settles: one outcome for every input, never worse with one more valid rollout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.failure import FailureConfig
from tests.workflows.test_failures import FAILURE
from workflows.messages import Bucket, Purpose, RolloutResult, RolloutState
from workflows.settling import Counts, bucket_of, can_train, counted, outcome

SETTLED: list[RolloutState] = ["valid", "masked", "lost"]
PURPOSES: list[Purpose] = ["train", "validation", "diagnostic"]
BEST_FIRST = ["sealed", "parked", "dropped"]

rollouts = st.lists(st.sampled_from(SETTLED), min_size=1, max_size=16)
purposes = st.sampled_from(PURPOSES)
configs = st.builds(
    FailureConfig,
    on_lost_rollout=st.sampled_from(["mask", "drop_group"]),
    on_dropped_prompt=st.sampled_from(["shrink", "replace", "park"]),
)


def group(letters: str) -> Counts:
    """Counts of a group in letters: v(alid), m(asked), l(ost), o(pen)."""
    states: dict[str, RolloutState] = {"v": "valid", "m": "masked", "l": "lost", "o": "open"}
    return counted(states[letter] for letter in letters)


@pytest.mark.parametrize(
    ("letters", "min_valid", "on_lost", "sealed"),
    [
        ("vv", 2, "mask", True),
        ("vl", 2, "mask", False),
        ("vl", 1, "mask", True),
        ("vl", 1, "drop_group", False),
        ("vm", 1, "drop_group", True),
        ("vvvl", 2, "mask", True),
        ("mm", 1, "mask", False),
        ("ll", 1, "mask", False),
    ],
)
def test_a_group_trains_with_enough_valid_rollouts(letters: str, min_valid: int, on_lost: str, sealed: bool) -> None:
    failure = FailureConfig.model_validate({"on_lost_rollout": on_lost})
    assert (outcome(group(letters), min_valid, "train", failure) == "sealed") is sealed


@pytest.mark.parametrize(
    ("purpose", "on_dropped", "ending"),
    [
        ("train", "park", "parked"),
        ("train", "shrink", "dropped"),
        ("train", "replace", "dropped"),
        ("validation", "park", "dropped"),
        ("diagnostic", "park", "dropped"),
    ],
)
def test_only_a_group_that_trains_is_parked(purpose: Purpose, on_dropped: str, ending: str) -> None:
    failure = FailureConfig.model_validate({"on_dropped_prompt": on_dropped})
    assert outcome(group("ll"), 1, purpose, failure) == ending


@given(rollouts, st.integers(1, 16), purposes, configs)
def test_every_group_has_exactly_one_outcome(
    states: list[RolloutState], min_valid: int, purpose: Purpose, failure: FailureConfig
) -> None:
    counts = counted(states)
    ending = outcome(counts, min_valid, purpose, failure)
    waits = failure.on_dropped_prompt == "park" and purpose == "train"
    lost_costs = failure.on_lost_rollout == "drop_group" and "lost" in states
    enough = states.count("valid") >= min_valid and not lost_costs
    assert {"sealed": enough, "parked": not enough and waits, "dropped": not enough and not waits} == {
        name: name == ending for name in BEST_FIRST
    }


@given(rollouts, st.data(), st.integers(1, 16), purposes, configs)
def test_one_more_valid_rollout_never_makes_it_worse(
    states: list[RolloutState], data: st.DataObject, min_valid: int, purpose: Purpose, failure: FailureConfig
) -> None:
    index = data.draw(st.integers(0, len(states) - 1))
    better: list[RolloutState] = [*states[:index], "valid", *states[index + 1 :]]
    before, after = (outcome(counted(each), min_valid, purpose, failure) for each in (states, better))
    assert BEST_FIRST.index(after) <= BEST_FIRST.index(before)


@given(st.lists(st.sampled_from([*SETTLED, "open"]), max_size=32))
def test_every_rollout_is_counted_once(states: list[RolloutState]) -> None:
    counts = counted(states)
    assert counts.valid + counts.masked + counts.lost + counts.open == counts.total == len(states)


@given(rollouts.map(lambda states: counted([*states, "open"])), st.integers(1, 16), purposes, configs)
def test_a_group_with_an_open_rollout_has_no_outcome(
    counts: Counts, min_valid: int, purpose: Purpose, failure: FailureConfig
) -> None:
    with pytest.raises(ValueError, match=f"1 of {counts.total} rollouts have not settled"):
        outcome(counts, min_valid, purpose, failure)


def test_an_open_rollout_is_not_a_lost_one() -> None:
    assert can_train(group("vvo"), 2, FailureConfig(on_lost_rollout="drop_group"))


@pytest.mark.parametrize(
    ("states", "last", "bucket"),
    [
        ("ll", {0: "data", 1: "data"}, "data"),
        ("ll", {0: "data", 1: "infra"}, "infra"),
        ("vl", {0: "infra", 1: "data"}, "data"),
        ("ml", {0: "infra", 1: "infra"}, "infra"),
        ("mm", {}, "data"),
        ("ml", {}, "data"),
    ],
    ids=["all data", "one infra", "infra of a valid one", "infra of a lost one", "masked", "lost before"],
)
def test_a_drop_is_the_infrastructure_s_as_soon_as_one_lost_rollout_is(
    states: str, last: dict[int, Bucket], bucket: Bucket
) -> None:
    names = {"v": "valid", "m": "masked", "l": "lost"}
    results = {
        index: RolloutResult.model_validate(
            {"rollout_id": f"g/rollout-{index}", "index": index, "state": names[letter], "attempt": 0}
        )
        for index, letter in enumerate(states)
    }
    failures = {index: FAILURE.model_copy(update={"bucket": of}) for index, of in last.items()}
    assert bucket_of(results, failures) == bucket
