"""Rows become padded micro-batches: nothing is lost, nothing is counted twice, padding is masked."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.microbatches import MicroBatch, micro_batches, padding_rows


@pytest.mark.parametrize(("rows", "quantum", "expected"), [(4, 4, 0), (5, 4, 3), (7, 8, 1), (9, 8, 7), (11, 4, 1)])
def test_padding_rows(rows: int, quantum: int, expected: int) -> None:
    assert padding_rows(rows, quantum) == expected


def batch_of(lengths: list[int]) -> TrainingBatch:
    """Row i has tokens i + 1, advantage i + 1, and every token but the first sampled."""
    rows = tuple(
        TrainingRow(
            f"r{i}",
            0,
            np.full(length, i + 1, dtype=np.int32),
            np.array([0] + [1] * (length - 1), dtype=np.uint8),
            np.array([0] + [-(i + 1)] * (length - 1), dtype=np.float32),
            float(i + 1),
        )
        for i, length in enumerate(lengths)
    )
    return TrainingBatch("run", 0, rows)


def of_rank(lengths: list[int], rows_per_pass: int, ranks: int, rank: int) -> list[MicroBatch]:
    return micro_batches(
        batch_of(lengths),
        rows_per_pass=rows_per_pass,
        data_parallel_size=ranks,
        data_parallel_rank=rank,
        device=torch.device("cpu"),
    )


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@given(lengths, st.integers(1, 5), st.integers(1, 4))
def test_each_sampled_token_is_in_exactly_one_micro_batch(lengths: list[int], rows_per_pass: int, ranks: int) -> None:
    seen: list[float] = []
    for rank in range(ranks):
        for micro in of_rank(lengths, rows_per_pass, ranks, rank):
            assert micro.tokens.shape == micro.labels.shape == micro.loss_mask.shape == micro.position_ids.shape
            selected = micro.loss_mask > 0
            seen += micro.labels[selected].tolist()
            assert torch.equal(micro.labels[selected], micro.tokens[selected])
            assert torch.equal(micro.generation_log_probs[selected], -micro.labels[selected].float())
            assert torch.equal(micro.advantages.expand_as(selected)[selected], micro.labels[selected].float())

    assert sorted(seen) == sorted(i + 1 for i, length in enumerate(lengths) for _ in range(length - 1))


@given(lengths, st.integers(1, 5), st.integers(1, 4))
def test_every_rank_runs_equally_many_micro_batches(lengths: list[int], rows_per_pass: int, ranks: int) -> None:
    of_ranks = [of_rank(lengths, rows_per_pass, ranks, rank) for rank in range(ranks)]

    counts = {len(micros) for micros in of_ranks}
    assert len(counts) == 1
    assert {micro.tokens.shape[0] for micros in of_ranks for micro in micros} == {rows_per_pass}
    rows = len(lengths) + padding_rows(len(lengths), rows_per_pass * ranks)
    assert counts.pop() * rows_per_pass * ranks == rows


def test_rows_of_like_length_share_a_pass() -> None:
    micros = of_rank([3, 30, 4, 29, 5], rows_per_pass=2, ranks=1, rank=0)

    assert [micro.tokens.shape[1] + 1 for micro in micros] == [30, 5, 3]
