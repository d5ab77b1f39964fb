"""The byte form of a batch, and what a row may hold."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load, save

from activities.training.batch import BadBatch, TrainingBatch, TrainingRow, placeholder


def make_row(mask: list[int], rollout: str = "r", segment: int = 0, advantage: float = 1.0) -> TrainingRow:
    tokens = np.arange(len(mask), dtype=np.int32)
    log_probs = np.array([-0.5 * value for value in mask], dtype=np.float32)
    return TrainingRow(rollout, segment, tokens, np.array(mask, dtype=np.uint8), log_probs, advantage)


masks = st.lists(st.integers(0, 1), min_size=1, max_size=8)
advantages = st.floats(allow_nan=False, allow_infinity=False)
rollouts = st.lists(
    st.tuples(st.text(min_size=1, max_size=20), st.lists(st.tuples(masks, advantages), min_size=1, max_size=3)),
    max_size=4,
    unique_by=lambda rollout: rollout[0],
)


def batch_of(drawn: list[tuple[str, list[tuple[list[int], float]]]], step: int = 0) -> TrainingBatch:
    made = [
        make_row(mask, rollout, segment, advantage)
        for rollout, segments in drawn
        for segment, (mask, advantage) in enumerate(segments)
    ]
    return TrainingBatch("run", step, tuple(made))


@given(rollouts, st.integers(0, 10**6))
def test_bytes_hold_the_whole_batch(drawn: list[tuple[str, list[tuple[list[int], float]]]], step: int) -> None:
    batch = batch_of(drawn, step)

    read = TrainingBatch.from_bytes(batch.to_bytes())

    assert (read.run_id, read.step, len(read.rows)) == ("run", step, len(batch.rows))
    for before, after in zip(batch.rows, read.rows, strict=True):
        assert (after.rollout_id, after.segment, after.advantage) == (
            before.rollout_id,
            before.segment,
            before.advantage,
        )
        for name in ("tokens", "loss_mask", "log_probs"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), strict=True)
    assert read.to_bytes() == batch.to_bytes()


def without(batch: TrainingBatch, index: int) -> TrainingBatch:
    return replace(batch, rows=batch.rows[:index] + batch.rows[index + 1 :])


def changed(batch: TrainingBatch, index: int, **fields: Any) -> TrainingBatch:
    rows = list(batch.rows)
    rows[index] = replace(rows[index], **fields)
    return replace(batch, rows=tuple(rows))


def plus(array: NDArray[Any], place: int, step: float) -> NDArray[Any]:
    """The array with one value moved by as little as its type can hold, or by `step`."""
    other = array.copy()
    other[place] = np.nextafter(other[place], np.float32(0)) if array.dtype == np.float32 else other[place] + step
    return other


CERTAIN = replace(make_row([0, 1], "b"), log_probs=np.zeros(2, dtype=np.float32))
ROWS = (make_row([0, 1, 1], "a", 0), make_row([0, 1], "a", 1), CERTAIN)
CHANGES: dict[str, Callable[[TrainingBatch], TrainingBatch]] = {
    "run": lambda batch: replace(batch, run_id="other"),
    "step": lambda batch: replace(batch, step=8),
    "token": lambda batch: changed(batch, 0, tokens=plus(batch.rows[0].tokens, 2, 1)),
    "prompt token": lambda batch: changed(batch, 0, tokens=plus(batch.rows[0].tokens, 0, 1)),
    "log-probability": lambda batch: changed(batch, 0, log_probs=plus(batch.rows[0].log_probs, 1, 0)),
    "mask": lambda batch: changed(batch, 2, loss_mask=np.zeros(2, dtype=np.uint8)),
    "advantage": lambda batch: changed(batch, 1, advantage=1.0 + 1e-15),
    "owner": lambda batch: changed(batch, 2, rollout_id="c"),
    "one row less": lambda batch: without(batch, 2),
    "one row more": lambda batch: replace(batch, rows=(*batch.rows, placeholder("c"))),
    "order of rollouts": lambda batch: replace(batch, rows=(batch.rows[2], *batch.rows[:2])),
    "cut between rows": lambda batch: replace(
        batch,
        rows=(
            make_row([0, 1], "a", 0),
            replace(make_row([1, 0, 1], "a", 1), tokens=np.array([2, 0, 1], dtype=np.int32)),
            batch.rows[2],
        ),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_anything_that_enters_the_gradient_changes_the_bytes(name: str) -> None:
    batch = TrainingBatch("run", 7, ROWS)

    assert TrainingBatch("run", 7, ROWS).to_bytes() == batch.to_bytes()
    assert CHANGES[name](batch).to_bytes() != batch.to_bytes()


def test_every_field_of_a_row_and_of_a_batch_is_in_the_bytes() -> None:
    """A new field must be added to `CHANGES`, and to the byte form."""
    assert [field.name for field in fields(TrainingBatch)] == ["run_id", "step", "rows"]
    assert [field.name for field in fields(TrainingRow)] == [
        "rollout_id",
        "segment",
        "tokens",
        "loss_mask",
        "log_probs",
        "advantage",
    ]


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


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", 0), ("b", 0), ("a", 1)], "row a segment 1 stands apart from the other rows of its rollout"),
        ([("a", 0), ("a", 2)], "row a segment 2 stands where segment 1 of this rollout belongs"),
        ([("a", 1)], "row a segment 1 stands where segment 0 of this rollout belongs"),
        ([("b", 0), ("a", 1), ("a", 0)], "row a segment 1 stands where segment 0 of this rollout belongs"),
        ([("a", 0), ("a", 0)], "row a segment 0 stands where segment 1 of this rollout belongs"),
        ([("a", 0), ("b", 0), ("a", 0)], "row a segment 0 stands apart from the other rows of its rollout"),
        ([("a", -1)], "row a segment -1 stands where segment 0 of this rollout belongs"),
    ],
)
def test_a_row_out_of_place_is_refused_by_name(rows: list[tuple[str, int]], message: str) -> None:
    with pytest.raises(BadBatch, match=f"Step 3 of run climb: {message}"):
        TrainingBatch("climb", 3, tuple(make_row([0, 1], rollout, segment) for rollout, segment in rows))


@given(rollouts.filter(len), st.data())
def test_no_other_order_of_the_rows_is_a_batch_unless_it_moves_whole_rollouts(
    drawn: list[tuple[str, list[tuple[list[int], float]]]], data: st.DataObject
) -> None:
    batch = batch_of(drawn)
    order = data.draw(st.permutations(range(len(batch.rows))))
    rows = tuple(batch.rows[i] for i in order)
    runs = [rollout for rollout, _ in groupby(row.rollout_id for row in rows)]
    whole = len(runs) == len(drawn) and all(
        [row.segment for row in rows if row.rollout_id == rollout] == list(range(len(segments)))
        for rollout, segments in drawn
    )

    if whole:
        assert replace(batch, rows=rows).rollouts == len(drawn)
    else:
        with pytest.raises(BadBatch):
            replace(batch, rows=rows)


def test_bytes_of_rows_out_of_place_are_refused() -> None:
    batch = TrainingBatch("run", 0, (make_row([0, 1], "a", 0), make_row([0, 1], "a", 1)))
    arrays = load(batch.to_bytes())
    arrays["segments"] = arrays["segments"][::-1].copy()

    with pytest.raises(BadBatch, match="row a segment 1 stands where segment 0"):
        TrainingBatch.from_bytes(save(arrays))


def test_what_trains_is_counted_by_rollout() -> None:
    rows = (make_row([1, 0], "a", 0), make_row([0, 1, 1], "a", 1), placeholder("b"), make_row([0, 1], "c"))
    batch = TrainingBatch("run", 0, rows)

    assert batch.trained_tokens_of == {"a": 2, "c": 1}
    assert batch.first_trained_rows == {"a": 1, "c": 3}
