"""Rows that vLLM and the trainer disagree about are found by their mean error, and then train nothing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import TrainingBatch
from activities.training.errors import EmptyBatch
from activities.training.row_filter import row_errors, without_rows
from tests.training.rollouts import row, settled


def test_the_error_of_a_row_is_over_its_masked_tokens_only() -> None:
    generation = torch.tensor([[-1.0, -2.0, 5.0], [-1.0, math.nan, -1.0], [-3.0, -3.0, -3.0]])
    prev = torch.tensor([[-1.1, -1.8, -9.0], [-1.0, -1.0, -math.inf], [-3.0, -3.0, -3.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])

    errors = row_errors(prev, generation, mask)

    assert errors.tolist() == pytest.approx([(math.exp(0.1) + math.exp(0.2)) / 2, 0.0, 1.0], rel=1e-6)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=1, max_size=4))
def test_the_error_is_at_least_one_and_does_not_ask_who_is_higher(gaps: list[list[float]]) -> None:
    generation = torch.zeros(len(gaps), 4, dtype=torch.float64)
    gap, mask = torch.tensor(gaps, dtype=torch.float64), torch.ones(len(gaps), 4)

    errors = row_errors(generation + gap, generation, mask)

    assert torch.equal(errors, row_errors(generation - gap, generation, mask))
    assert bool((errors >= 1).all())
    expected = [math.fsum(math.exp(abs(one)) for one in of_row) / 4 for of_row in gaps]
    assert errors.tolist() == pytest.approx(expected, rel=1e-12)


def batch() -> TrainingBatch:
    """Two rollouts; the first has two rows."""
    first, second = settled(0, 0, 1.0), settled(0, 1, 0.0)
    return TrainingBatch("climb", 4, (row(first, 0, 3), row(first, 1, 2), row(second, 0, 4)))


def test_a_dropped_row_keeps_its_place_and_its_tokens_and_trains_nothing() -> None:
    before = batch()

    after = without_rows(before, {1})

    assert [one.trained_tokens for one in after.rows] == [3, 0, 4]
    assert (after.run_id, after.step, after.rollouts, len(after.rows)) == ("climb", 4, 2, 3)
    kept, dropped = after.rows[0], after.rows[1]
    assert kept is before.rows[0]
    assert (dropped.rollout_id, dropped.segment, dropped.advantage) == (kept.rollout_id, 1, before.rows[1].advantage)
    np.testing.assert_array_equal(dropped.tokens, before.rows[1].tokens, strict=True)
    assert not dropped.loss_mask.any()
    assert not dropped.log_probs.any()
    assert [one.trained_tokens for one in before.rows] == [3, 2, 4]


def test_the_denominators_of_what_is_left_are_its_own() -> None:
    after = without_rows(batch(), [0])

    assert after.trained_tokens_of == {"climb/step-0/group-0/rollout-0": 2, "climb/step-0/group-0/rollout-1": 4}
    assert after.first_trained_rows == {"climb/step-0/group-0/rollout-0": 1, "climb/step-0/group-0/rollout-1": 2}


def test_nothing_dropped_is_the_same_batch() -> None:
    assert without_rows(batch(), ()).to_bytes() == batch().to_bytes()


def test_a_step_that_loses_every_row_is_refused_by_name() -> None:
    with pytest.raises(
        EmptyBatch, match=r"Step 4 of run climb: all 3 rows .* grpo\.seq_logprob_error_threshold"
    ) as told:
        without_rows(batch(), [0, 1, 2])
    assert "raise the threshold" in str(told.value)
