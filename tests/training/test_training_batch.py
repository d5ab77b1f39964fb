"""The byte form of a batch, and what a row may hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import BadBatch, TrainingBatch, TrainingRow


def make_row(mask: list[int], rollout: str = "r", segment: int = 0, advantage: float = 1.0) -> TrainingRow:
    tokens = np.arange(len(mask), dtype=np.int32)
    log_probs = np.array([-0.5 * value for value in mask], dtype=np.float32)
    return TrainingRow(rollout, segment, tokens, np.array(mask, dtype=np.uint8), log_probs, advantage)


masks = st.lists(st.integers(0, 1), min_size=1, max_size=8)
rows = st.builds(
    make_row,
    masks,
    st.text(min_size=1, max_size=20),
    st.integers(0, 5),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(rows, max_size=6), st.integers(0, 10**6))
def test_bytes_hold_the_whole_batch(made: list[TrainingRow], step: int) -> None:
    batch = TrainingBatch("run", step, tuple(made))

    read = TrainingBatch.from_bytes(batch.to_bytes())

    assert (read.run_id, read.step, len(read.rows)) == ("run", step, len(made))
    for before, after in zip(made, read.rows, strict=True):
        assert (after.rollout_id, after.segment, after.advantage) == (
            before.rollout_id,
            before.segment,
            before.advantage,
        )
        for name in ("tokens", "loss_mask", "log_probs"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), strict=True)
    assert read.to_bytes() == batch.to_bytes()


def test_another_advantage_gives_other_bytes() -> None:
    one, other = (TrainingBatch("run", 0, (make_row([0, 1], advantage=value),)) for value in (1.0, 1.0 + 1e-15))

    assert one.to_bytes() != other.to_bytes()


def test_bytes_of_something_else_are_refused() -> None:
    with pytest.raises(BadBatch, match="not a training batch"):
        TrainingBatch.from_bytes(b"something else")


def test_cut_bytes_are_refused() -> None:
    data = TrainingBatch("run", 0, (make_row([0, 1]),)).to_bytes()

    with pytest.raises(BadBatch, match="not a training batch"):
        TrainingBatch.from_bytes(data[:-3])


def test_a_first_token_trains_nothing() -> None:
    assert make_row([1, 0, 0]).trained_tokens == 0
    assert make_row([1, 0, 1]).trained_tokens == 1


def test_a_rollout_is_counted_once_however_many_segments_it_has() -> None:
    batch = TrainingBatch("run", 0, (make_row([0, 1], "a", 0), make_row([0, 1, 1], "a", 1), make_row([0, 1], "b")))

    assert batch.rollouts == 2
    assert batch.trained_tokens == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(3, dtype=np.int64)}, "tokens must be one-dimensional int32"),
        ({"tokens": np.zeros(2, dtype=np.int32)}, "equally many"),
        ({"loss_mask": np.array([0, 2, 1], dtype=np.uint8)}, "other than 0 and 1"),
        ({"log_probs": np.array([0, np.nan, -1], dtype=np.float32)}, "not a finite number"),
        ({"log_probs": np.array([-1, -1, -1], dtype=np.float32)}, "not sampled"),
        ({"advantage": float("inf")}, "not a finite number"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "rollout_id": "run/step-0/group-1/rollout-2",
        "segment": 4,
        "tokens": np.zeros(3, dtype=np.int32),
        "loss_mask": np.array([0, 1, 1], dtype=np.uint8),
        "log_probs": np.array([0, -1, -1], dtype=np.float32),
        "advantage": 1.0,
    }

    with pytest.raises(BadBatch, match=message) as refused:
        TrainingRow(**(good | change))  # pyright: ignore[reportArgumentType]

    assert "run/step-0/group-1/rollout-2 segment 4" in str(refused.value)
