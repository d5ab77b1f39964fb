"""From rows to padded tensors: the same micro-batches for the same batch, equally many on every data-parallel rank.

Rows are sorted by length, so that little is padded. Padding rows (one token, mask 0) fill the step once to a multiple
of data-parallel ranks times rows per micro-batch; padding never has mask 1, so it never changes the loss.
"""

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

    `loss_mask` (float32) and `generation_log_probs` belong to the labels; `advantages` is [rows, 1].
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    generation_log_probs: Tensor
    advantages: Tensor

    @property
    def trained_tokens(self) -> int:
        """Tokens with loss mask 1."""
        return int(self.loss_mask.sum().item())


def padding_rows(rows: int, quantum: int) -> int:
    """Rows to add so that `quantum` (data-parallel ranks * rows per micro-batch) divides their number."""
    return -rows % quantum


def micro_batches(
    batch: TrainingBatch, *, rows_per_pass: int, data_parallel_size: int, data_parallel_rank: int, device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of one data-parallel rank, longest rows first."""
    quantum = rows_per_pass * data_parallel_size
    padding = [None] * padding_rows(len(batch.rows), quantum)
    rows = [*sorted(batch.rows, key=lambda row: -len(row.tokens)), *padding]
    first = data_parallel_rank * rows_per_pass
    return [_pad(rows[start : start + rows_per_pass], device) for start in range(first, len(rows), quantum)]


def _pad(rows: list[TrainingRow | None], device: torch.device) -> MicroBatch:
    """Right-pad rows to the longest; None is a padding row."""
    width = max(2, *(1 if row is None else len(row.tokens) for row in rows))
    tokens = np.full((len(rows), width), PADDING_TOKEN, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.float32)
    log_probs = np.zeros((len(rows), width), dtype=np.float32)
    advantages = np.zeros((len(rows), 1), dtype=np.float32)
    for i, row in enumerate(rows):
        if row is None:
            continue
        length = len(row.tokens)
        tokens[i, :length] = row.tokens
        mask[i, :length] = row.loss_mask
        log_probs[i, :length] = row.log_probs
        advantages[i] = row.advantage
    return MicroBatch(
        tokens=_tensor(tokens[:, :-1], device),
        labels=_tensor(tokens[:, 1:], device),
        position_ids=torch.arange(width - 1, device=device).expand(len(rows), -1),
        loss_mask=_tensor(mask[:, 1:], device),
        generation_log_probs=_tensor(log_probs[:, 1:], device),
        advantages=_tensor(advantages, device),
    )


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
