"""What is known of each row of a batch after a pass, equal on all ranks: so a row can be judged, and named.

A row lives on one data-parallel rank; adding over the ranks (zeros elsewhere) hands it to all of them unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from activities.training.loss import LossTerms
from activities.training.megatron.agreement import added
from activities.training.megatron.ranks import trainer_device
from activities.training.microbatches import MicroBatch
from activities.training.row_filter import row_errors


@dataclass(frozen=True)
class RowFacts:
    """Of each row of the batch: the numbers of `row_facts`, as lists."""

    losses: list[float]
    errors: list[float]
    gaps: list[float]
    generation: list[float]
    trainer: list[float]
    tokens: list[float]


@torch.no_grad()
def row_facts(log_probs: Tensor, micro: MicroBatch, terms: LossTerms) -> Tensor:
    """[rows, 6] float64: loss, error (`row_errors`), and of the token with the widest gap between vLLM and trainer:
    the gap, both log-probabilities, and its place in the row. Zeros for a row without trained tokens.
    """
    selected, generation = micro.loss_mask > 0, micro.generation_log_probs
    gaps = torch.where(selected, (generation - log_probs).abs(), 0.0)
    widest, at = gaps.max(dim=-1, keepdim=True)
    numbers = (
        terms.row_losses,
        row_errors(log_probs, generation, micro.loss_mask),
        widest[:, 0],
        generation.gather(1, at)[:, 0],
        log_probs.gather(1, at)[:, 0],
        at[:, 0] + 1,  # position t predicts token t + 1
    )
    facts = torch.stack([value.double() for value in numbers], dim=-1)
    return torch.where(selected.any(dim=-1, keepdim=True), facts, 0.0)


def gather_facts(facts: Sequence[Tensor], micros: Sequence[MicroBatch], rows: int) -> RowFacts:
    """The facts of all rows of the batch, from each rank's micro-batches. Collective."""
    return RowFacts(*gather_rows(facts, micros, rows, 6).t().tolist())


def gather_rows(values: Sequence[Tensor], micros: Sequence[MicroBatch], rows: int, width: int) -> Tensor:
    """[rows of the batch, width] float64 from [rows of a micro-batch, width] each. Collective."""
    result = torch.zeros(rows, width, dtype=torch.float64, device=trainer_device())
    for value, micro in zip(values, micros, strict=False):  # no values off the last pipeline stage
        places = [place for place, row in enumerate(micro.rows) if row is not None]
        result[[micro.rows[place] for place in places]] = value.double()[places]
    return added(result)
