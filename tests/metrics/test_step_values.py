"""Statistics of a step: means, spreads and percentiles, and what follows from few values or none."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.metrics.step_values import percentile, spread, step_values
from storage.step_statistics import RunCounters, StepStatistics
from tests.metrics.test_catalogue import rollout

VALUES = st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=40)
NOTHING = RunCounters.model_validate(dict.fromkeys(RunCounters.model_fields, 0))


def values_of(*rollouts: object) -> dict[str, float]:
    read = StepStatistics.model_validate({"batch": None, "rollouts": rollouts, "run": NOTHING, "retries": ()})
    return step_values(read, {1: "climber"}, {}, ranks=1, prompts=4)


@given(VALUES, st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)


@given(VALUES)
def test_spread_is_that_of_the_values(values: list[float]) -> None:
    found = spread("x", values)
    assert found["x/min"] <= found["x/median"] <= found["x/max"]
    assert found["x/mean"] == pytest.approx(math.fsum(values) / len(values))
    assert found["x/stddev"] == (statistics.stdev(values) if len(values) > 1 else 0.0)


def test_nothing_has_zeros() -> None:
    assert set(spread("x", []).values()) == {0.0}
    assert percentile([], 95) == 0.0


def test_masked_and_lost_rollouts_have_no_part_in_rewards_and_tokens() -> None:
    valid = rollout(reward=0.5, generated_tokens=8, turns=3)
    masked = rollout(state="masked", reward=1.0, generated_tokens=900, truncated=True)
    lost = rollout(state="lost", reward=None, answered=False)
    values = values_of(valid, masked, lost)
    assert (values["total_reward/mean"], values["total_reward/max"]) == (0.5, 0.5)
    assert values["gen_tokens_per_sample/max"] == 8
    assert values["turns_per_sample/p99"] == 3
    assert values["truncation_rate"] == values["natural_termination_rate"] == 0.5
    assert values["finalize/invalid_row_rate"] == pytest.approx(2 / 3)
    assert values["climber/reward/mean"] == 0.5


@given(st.lists(st.booleans(), max_size=20))
def test_every_answer_was_cut_off_or_ended_by_itself(cut: list[bool]) -> None:
    values = values_of(*(rollout(truncated=truncated) for truncated in cut))
    assert values["truncation_rate"] + values["natural_termination_rate"] == pytest.approx(1.0 if cut else 0.0)
