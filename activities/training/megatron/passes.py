"""Passes of one optimizer step over the micro-batches: log-probabilities, and the loss with its gradient.

Both run Megatron-core's schedules, so they work for any layout. Results live on the last pipeline stage.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from activities.training.loss import LossTerms, grpo_loss
from activities.training.megatron.ranks import pipeline_ranks
from activities.training.microbatches import MicroBatch
from configs.grpo import LossConfig


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch and the reference policy's log-probabilities, [rows, tokens].

    `reference` is None without a KL term, and off the last pipeline stage.
    """

    micro: MicroBatch
    reference: Tensor | None


@torch.no_grad()
def log_probabilities(model: DistributedDataParallel, micros: Sequence[MicroBatch]) -> list[Tensor | None]:
    """Log-probability of each label, [rows, tokens] per micro-batch; None where this is not the last stage."""

    def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
        assert non_loss_data
        return -output.float()

    def forward(inputs: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        return _forward(model, next(inputs)), collect

    model.eval()
    results = _run(forward, model, micros, micros, forward_only=True, collect_non_loss_data=True)
    return results if parallel_state.is_pipeline_last_stage() else [None] * len(micros)


def gradients(model: DistributedDataParallel, inputs: Sequence[LossInputs], config: LossConfig) -> dict[str, float]:
    """Accumulate the gradient of the mean loss over all tokens of the step. Returns the metrics, equal on all ranks.

    Means are exact over all ranks and micro-batches: sums are added first, then divided by the tokens of the step.
    """

    def loss(inputs: LossInputs, output: Tensor) -> tuple[Tensor, Tensor, LossTerms]:
        micro = inputs.micro
        curr = -output.float()
        terms = grpo_loss(
            curr=curr,
            # A batch gives one optimizer step, so this pass itself is the policy at the start of the step.
            prev=curr.detach(),
            generation=micro.generation_log_probs,
            reference=inputs.reference,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            config=config,
        )
        return terms.loss, micro.loss_mask.sum().to(torch.int), replace(terms, loss=terms.loss.detach())

    def forward(inputs: Iterator[LossInputs], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        item = next(inputs)
        return _forward(model, item.micro), partial(loss, item)

    model.train()
    model.zero_grad_buffer()
    micros = [item.micro for item in inputs]
    terms = _run(forward, model, inputs, micros, forward_only=False, collect_non_loss_data=False)
    return _reduce(terms, micros)


def _forward(model: Any, micro: MicroBatch) -> Tensor:
    return model(micro.tokens, micro.position_ids, None, labels=micro.labels)


def _run(
    forward: Callable[..., Any],
    model: DistributedDataParallel,
    items: Sequence[Any],
    micros: Sequence[MicroBatch],
    *,
    forward_only: bool,
    collect_non_loss_data: bool,
) -> list[Any]:
    rows, tokens = micros[0].tokens.shape
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(items),
        model=[model],
        num_microbatches=len(items),
        seq_length=tokens,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )


def _reduce(terms: Sequence[LossTerms], micros: Sequence[MicroBatch]) -> dict[str, float]:
    """Add over micro-batches and data-parallel ranks, divide by tokens, and share with the other pipeline stages."""
    metrics: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        group = parallel_state.get_data_parallel_group()
        sums = {name: torch.stack([item.sums[name] for item in terms]).sum() for name in terms[0].sums}
        tokens = torch.stack([micro.loss_mask.sum().double() for micro in micros]).sum()
        added = torch.stack([*sums.values(), tokens])
        dist.all_reduce(added, group=group)
        maxima = {name: torch.stack([item.maxima[name] for item in terms]).max() for name in terms[0].maxima}
        greatest = torch.stack([*maxima.values()])
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        values = [*(added[:-1] / added[-1]).tolist(), *greatest.tolist()]
        metrics = dict(zip([*sums, *maxima], values, strict=True))
    stages = pipeline_ranks()
    if len(stages) == 1:
        return metrics
    shared = [metrics]
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(shared, src=stages[-1], group=group)
    return shared[0]
