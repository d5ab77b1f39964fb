"""Steps that must not be applied: values that are not finite, and rows that vLLM and the trainer disagree about.

All ranks come to the same verdict with the same words. Nothing here touches weights or optimizer state.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from activities.training.batch import TrainingBatch
from activities.training.errors import LogProbGap, NonFiniteStep
from activities.training.megatron.ranks import trainer_device
from activities.training.megatron.row_facts import RowFacts
from activities.training.microbatches import MicroBatch

MAX_NAMED_ROWS = 5
MAX_SEARCHED_PASSES = 512
"""Single-row passes per rank that the search for a bad gradient may take."""


def check_loss(batch: TrainingBatch, version: int, loss: float, facts: RowFacts) -> None:
    """Raise NonFiniteStep, with the rows that caused it, unless the loss is finite."""
    if math.isfinite(loss):
        return
    rows = [row for row, value in enumerate(facts.losses) if not math.isfinite(value)]
    raise NonFiniteStep(
        f"{_opening(batch)} gives the loss {loss}. {_cause(batch, rows)} The weights of version {version} are "
        "unchanged. Look at the advantages and recorded log-probabilities of these rows; if they are sound, the "
        "weights themselves may be broken: go back to an older checkpoint with a lower training.lr."
    )


def check_norm(batch: TrainingBatch, version: int, norm: float, search: Callable[[], list[int]]) -> None:
    """Raise NonFiniteStep, with the rows that `search` finds, unless the norm of the gradient is finite."""
    if math.isfinite(norm):
        return
    raise NonFiniteStep(
        f"{_opening(batch)} gives a finite loss, but the gradient norm {norm}. {_cause(batch, search())} The weights "
        f"of version {version} are unchanged. Look at the advantages and recorded log-probabilities of these rows; if "
        "they are sound, lower training.lr and go back to an older checkpoint."
    )


def check_gaps(batch: TrainingBatch, version: int, limit: float | None, facts: RowFacts) -> None:
    """Raise LogProbGap when a trained token's log-probability differs by more than `limit` between vLLM and trainer."""
    if limit is None:
        return
    over = [row for row, gap in enumerate(facts.gaps) if gap > limit]
    if not over:
        return
    worst = heapq.nlargest(MAX_NAMED_ROWS, over, key=lambda row: facts.gaps[row])
    named = "; ".join(
        f"{_name(batch, row)}, token {int(facts.tokens[row])}: vLLM {facts.generation[row]:.4f}, trainer "
        f"{facts.trainer[row]:.4f}"
        for row in worst
    )
    raise LogProbGap(
        f"{_opening(batch)} is not applied: {len(over)} of its rows hold a token whose log-probability differs by more "
        f"than training.max_logprob_gap ({limit:g}) between vLLM and trainer. The widest gaps: {named}. The weights of "
        f"version {version} are unchanged. Look for a chat template that renders differently, a stale KV cache after a "
        "refit, a bad export of the weights, or another sampling temperature in vLLM."
    )


def rows_with_bad_gradients(
    batch: TrainingBatch, passes: Sequence[MicroBatch], run: Callable[[MicroBatch], None], gradients: Callable[[], Any]
) -> list[int]:
    """Rows whose own gradient is not finite, from one pass per row; a few at most. Collective.

    `passes` have one row each; `run` leaves the gradient of this rank's row, not reduced, in `gradients()`.
    """
    found: set[int] = set()
    for micro in passes[:MAX_SEARCHED_PASSES]:
        run(micro)
        bad = torch.zeros(len(batch.rows), dtype=torch.int, device=trainer_device())
        row = micro.rows[0]
        if row is not None and not _finite(gradients()):
            bad[row] = 1
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        found.update(bad.nonzero()[:, 0].tolist())
        if len(found) >= MAX_NAMED_ROWS:
            break
    return sorted(found)


@contextmanager
def unreduced(config: Any) -> Iterator[None]:
    """Backward passes inside leave each rank with its own gradient, and undivided."""
    finalize = config.finalize_model_grads_func
    config.finalize_model_grads_func = None
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _finite(gradients: Iterable[torch.Tensor]) -> bool:
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return bool(torch.isfinite(torch.linalg.vector_norm(torch.stack(norms))))


def _opening(batch: TrainingBatch) -> str:
    return f"Step {batch.step} of run {batch.run_id}"


def _name(batch: TrainingBatch, row: int) -> str:
    return f"rollout {batch.rows[row].rollout_id}, segment {batch.rows[row].segment}"


def _cause(batch: TrainingBatch, rows: list[int]) -> str:
    if not rows:
        return "No single row does this alone."
    more = f", and {len(rows) - MAX_NAMED_ROWS} more" if len(rows) > MAX_NAMED_ROWS else ""
    named = "; ".join(f"{_name(batch, row)}, advantage {batch.rows[row].advantage:g}" for row in rows[:MAX_NAMED_ROWS])
    return f"It comes from {named}{more}."
