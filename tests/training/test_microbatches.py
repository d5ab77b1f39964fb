"""Rows become padded micro-batches: nothing is lost, nothing is counted twice, padding is masked."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.microbatches import MicroBatch, padding_rows
from tests.training.rollouts import passes


def batch_of(lengths: list[int], rows_of_each: int = 1) -> TrainingBatch:
    """Row i has tokens i + 1, advantage i + 1, and every token but the first sampled."""
    rows = tuple(
        TrainingRow(
            f"r{i // rows_of_each}",
            i % rows_of_each,
            np.full(length, i + 1, dtype=np.int32),
            np.array([0] + [1] * (length - 1), dtype=np.uint8),
            np.array([0] + [-(i + 1)] * (length - 1), dtype=np.float32),
            float(i + 1),
        )
        for i, length in enumerate(lengths)
    )
    return TrainingBatch("run", 0, rows)


def of_all_ranks(
    batch: TrainingBatch, rows_per_pass: int, max_tokens: int, ranks: int, *, token_level: bool = True
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank."""
    return [
        passes(batch, rows_per_pass, max_tokens=max_tokens, token_level=token_level, ranks=ranks, rank=rank)
        for rank in range(ranks)
    ]


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)
layouts = st.tuples(st.integers(1, 5), st.integers(2, 120), st.integers(1, 4))


@given(lengths, layouts)
def test_every_row_is_in_exactly_one_micro_batch_of_all_ranks(lengths: list[int], layout: tuple[int, int, int]) -> None:
    rows_per_pass, max_tokens, ranks = layout
    batch = batch_of(lengths)
    places: Counter[int | None] = Counter()
    for micros in of_all_ranks(batch, rows_per_pass, max_tokens, ranks):
        for micro in micros:
            assert micro.tokens.shape == micro.labels.shape == micro.loss_mask.shape == micro.position_ids.shape
            assert micro.weights.shape == micro.generation_log_probs.shape == micro.loss_mask.shape
            assert micro.advantages.shape == (len(micro.rows), 1)
            places.update(micro.rows)
            for place, index in enumerate(micro.rows):
                if index is None:
                    assert not micro.loss_mask[place].any()
                    continue
                row, trained = batch.rows[index], slice(0, len(batch.rows[index].tokens) - 1)
                assert micro.tokens[place, trained].tolist() == row.tokens[:-1].tolist()
                assert micro.labels[place, trained].tolist() == row.tokens[1:].tolist()
                assert micro.loss_mask[place].sum().item() == row.trained_tokens
                assert micro.loss_mask[place, trained].tolist() == row.loss_mask[1:].tolist()
                assert micro.generation_log_probs[place, trained].tolist() == row.log_probs[1:].tolist()
                assert micro.advantages[place].item() == row.advantage

    assert places.pop(None, 0) == padding_rows(len(lengths), rows_per_pass * ranks)
    assert places == Counter(range(len(lengths)))


@given(lengths, layouts)
def test_no_pass_is_above_the_budget_unless_it_has_one_row_per_rank(
    lengths: list[int], layout: tuple[int, int, int]
) -> None:
    rows_per_pass, max_tokens, ranks = layout
    for micros in of_all_ranks(batch_of(lengths), rows_per_pass, max_tokens, ranks):
        for micro in micros:
            longest = max(1 if index is None else lengths[index] for index in micro.rows)
            assert len(micro.rows) <= rows_per_pass
            assert len(micro.rows) * longest <= max_tokens or len(micro.rows) == 1
            assert micro.tokens.shape == (len(micro.rows), max(1, longest - 1))


@given(lengths, layouts)
def test_ranks_run_equally_many_passes_of_equally_many_rows(lengths: list[int], layout: tuple[int, int, int]) -> None:
    rows_per_pass, max_tokens, ranks = layout
    shapes = [
        [len(micro.rows) for micro in micros]
        for micros in of_all_ranks(batch_of(lengths), rows_per_pass, max_tokens, ranks)
    ]

    assert all(shape == shapes[0] for shape in shapes)
    assert sum(shapes[0]) * ranks == len(lengths) + padding_rows(len(lengths), rows_per_pass * ranks)


@given(lengths.filter(lambda drawn: max(drawn) > 1), layouts, st.integers(1, 3), st.booleans())
def test_counts_and_weights_add_up_to_the_denominator_of_the_step(
    lengths: list[int], layout: tuple[int, int, int], rows_of_each: int, token_level: bool
) -> None:
    rows_per_pass, max_tokens, ranks = layout
    batch = batch_of(lengths, rows_of_each)
    micros = [
        micro
        for of_rank in of_all_ranks(batch, rows_per_pass, max_tokens, ranks, token_level=token_level)
        for micro in of_rank
    ]

    denominator = batch.trained_tokens if token_level else len(batch.trained_tokens_of)
    assert sum(micro.count for micro in micros) == denominator
    assert sum(micro.trained_tokens for micro in micros) == batch.trained_tokens
    assert sum(micro.weights.double().sum().item() for micro in micros) == pytest.approx(denominator, rel=1e-6)
    assert all(torch.equal(micro.weights > 0, micro.loss_mask > 0) for micro in micros)


def test_the_tokens_of_a_rollout_share_its_weight_in_whatever_pass_they_are() -> None:
    batch = batch_of([4, 2, 9, 3], rows_of_each=2)
    weights = {
        index: micro.weights[place].max().item()
        for micro in passes(batch, 1, token_level=False)
        for place, index in enumerate(micro.rows)
    }

    assert weights == pytest.approx({0: 1 / 4, 1: 1 / 4, 2: 1 / 10, 3: 1 / 10})


@given(lengths, layouts)
def test_the_same_batch_gives_the_same_micro_batches(lengths: list[int], layout: tuple[int, int, int]) -> None:
    first, second = (of_all_ranks(batch_of(lengths), *layout) for _ in range(2))

    for one, other in zip(chain(*first), chain(*second), strict=True):
        assert one.rows == other.rows
        assert torch.equal(one.tokens, other.tokens)


def test_rows_of_like_length_share_a_pass() -> None:
    micros = passes(batch_of([3, 30, 4, 29, 5]), rows_per_pass=2)

    assert [micro.rows for micro in micros] == [(1, 3), (4, 2), (0, None)]
    assert [micro.tokens.shape[1] + 1 for micro in micros] == [30, 5, 3]


def test_long_rows_go_alone_and_short_ones_together() -> None:
    micros = passes(batch_of([10, 100, 9, 40, 8, 41]), rows_per_pass=4, max_tokens=82)

    assert [micro.rows for micro in micros] == [(1,), (5, 3), (0, 2, 4, None), (None,)]


def test_the_rank_with_the_longest_rows_changes_from_pass_to_pass() -> None:
    first, second = of_all_ranks(batch_of([8, 7, 6, 5]), rows_per_pass=1, max_tokens=100, ranks=2)

    assert [micro.rows for micro in first] == [(0,), (3,)]
    assert [micro.rows for micro in second] == [(1,), (2,)]
