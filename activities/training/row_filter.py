"""The log-probability filter: rows that vLLM and the trainer disagree about do not train. Pure.

The error of a row and the comparison are NeMo-RL's (`seq_logprob_error_threshold`): a row trains while its error is
not above the threshold.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.errors import EmptyBatch


def row_errors(prev: Tensor, generation: Tensor, mask: Tensor) -> Tensor:
    """[rows] mean of exp(|generation - prev|) over the masked tokens of a row; 0 for a row without any.

    All inputs are [rows, tokens]: log-probabilities of the trainer at the start of the step and of vLLM, and the mask.
    """
    selected = mask > 0
    gap = torch.where(selected, (generation - prev).abs(), torch.zeros_like(prev)).double()
    added = torch.where(selected, torch.exp(gap), torch.zeros_like(gap)).sum(dim=-1)
    return added / selected.sum(dim=-1).clamp(min=1)


def without_rows(batch: TrainingBatch, dropped: Collection[int]) -> TrainingBatch:
    """The batch in which the rows with these indices keep their place and tokens, and train nothing.

    Raises:
        EmptyBatch: no row is left that trains.
    """
    gone = frozenset(dropped)
    kept = replace(batch, rows=tuple(_silent(row) if i in gone else row for i, row in enumerate(batch.rows)))
    if gone and kept.trained_tokens == 0:
        raise EmptyBatch(
            f"Step {batch.step} of run {batch.run_id}: all {len(gone)} rows that would train are above "
            "grpo.seq_logprob_error_threshold, so nothing is left. vLLM and the trainer disagree about every row: look "
            "for weights that were not published, another template or precision, or raise the threshold."
        )
    return kept


def _silent(row: TrainingRow) -> TrainingRow:
    return replace(row, loss_mask=np.zeros_like(row.loss_mask), log_probs=np.zeros_like(row.log_probs))
