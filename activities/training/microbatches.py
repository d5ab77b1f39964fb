"""From rows to padded tensors: the same micro-batches for the same batch, equally many on every data-parallel rank.

Rows are sorted by length, so that little is padded. Padding rows (one token, mask 0) fill the step once to a multiple
of data-parallel ranks times rows per pass; padding never has mask 1, so it never changes the loss. A pass takes fewer
rows when they are long: no more padded tokens than the budget, save that one row per rank always goes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from activities.training.batch import TrainingBatch, TrainingRow

PADDING_TOKEN = 0


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one pass, [rows, tokens], shifted: position t of `tokens` predicts `labels[t]`.

    `loss_mask`, `generation_log_probs` and `weights` (all float32) belong to the labels.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    generation_log_probs: Tensor
    advantages: Tensor
    """[rows, 1] float32."""
    weights: Tensor
    """What a token's loss counts: the mask, or the mask divided by the trained tokens of its rollout, all its rows."""
    count: int
    """Share of the step's denominator: tokens with mask 1, or rollouts whose first row that trains is here."""
    rows: tuple[int | None, ...]
    """Index of each row in the batch; None is a padding row."""

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss mask 1."""
        return int(self.loss_mask.sum().item())


def padding_rows(rows: int, quantum: int) -> int:
    """Rows to add so that `quantum` (data-parallel ranks * rows per pass) divides their number."""
    return -rows % quantum


def micro_batches(
    batch: TrainingBatch,
    *,
    rows_per_pass: int,
    max_tokens: int,
    token_level: bool,
    data_parallel_size: int,
    data_parallel_rank: int,
    device: torch.device,
) -> list[MicroBatch]:
    """The micro-batches of one data-parallel rank, longest rows first.

    `max_tokens` bounds rows times their longest row. `token_level` says whether every token of the step counts the
    same, or every rollout.
    """
    counts = batch.trained_tokens_of
    firsts = frozenset(batch.first_trained_rows.values())
    made: list[MicroBatch] = []
    for index, block in enumerate(_passes(batch, rows_per_pass, max_tokens, data_parallel_size)):
        # The rank that gets the longest rows changes from pass to pass, so that no rank always waits for it.
        size = len(block) // data_parallel_size
        first = (data_parallel_rank + index) % data_parallel_size * size
        rows = block[first : first + size]
        count = sum(row in firsts for row in rows)
        if token_level:
            count = sum(batch.rows[row].trained_tokens for row in rows if row is not None)
        made.append(_pad(batch.rows, rows, None if token_level else counts, count, device))
    return made


def _passes(batch: TrainingBatch, rows_per_pass: int, max_tokens: int, ranks: int) -> list[tuple[int | None, ...]]:
    """The rows of each pass over all ranks: an equal number for each rank, longest first, padding last."""
    lengths = [len(row.tokens) for row in batch.rows]
    by_length = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    order = [*by_length, *[None] * padding_rows(len(lengths), rows_per_pass * ranks)]
    passes: list[tuple[int | None, ...]] = []
    start = 0
    while start < len(order):
        longest = order[start]
        width = 1 if longest is None else lengths[longest]
        size = ranks * max(1, min(rows_per_pass, max_tokens // width))
        passes.append(tuple(order[start : start + size]))
        start += size
    return passes


def _pad(
    batch: Sequence[TrainingRow],
    rows: tuple[int | None, ...],
    trained_tokens_of: Mapping[str, int] | None,
    count: int,
    device: torch.device,
) -> MicroBatch:
    """Right-pad rows to the longest; None is a padding row."""
    width = max(2, *(1 if row is None else len(batch[row].tokens) for row in rows))
    tokens = np.full((len(rows), width), PADDING_TOKEN, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.float32)
    log_probs = np.zeros((len(rows), width), dtype=np.float32)
    advantages = np.zeros((len(rows), 1), dtype=np.float32)
    owned = np.ones((len(rows), 1), dtype=np.float32)
    for i, index in enumerate(rows):
        if index is None:
            continue
        row = batch[index]
        length = len(row.tokens)
        tokens[i, :length] = row.tokens
        mask[i, :length] = row.loss_mask
        log_probs[i, :length] = row.log_probs
        advantages[i] = row.advantage
        if trained_tokens_of is not None and row.trained_tokens:
            owned[i] = trained_tokens_of[row.rollout_id]
    return MicroBatch(
        tokens=_tensor(tokens[:, :-1], device),
        labels=_tensor(tokens[:, 1:], device),
        position_ids=torch.arange(width - 1, device=device).expand(len(rows), -1),
        loss_mask=_tensor(mask[:, 1:], device),
        generation_log_probs=_tensor(log_probs[:, 1:], device),
        advantages=_tensor(advantages, device),
        weights=_tensor((mask / owned)[:, 1:], device),
        count=count,
        rows=rows,
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
