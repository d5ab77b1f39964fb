"""Passes of one optimizer step over the micro-batches: log-probabilities, and the loss with its gradient.

Both run Megatron-core's schedules, so they work for any layout. Results live on the last pipeline stage. A watch that
cancels ends a pass between two micro-batches; the gradients accumulated so far are then worth nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from activities.training.loss import LossTerms, grpo_loss
from activities.training.megatron.row_facts import row_facts
from activities.training.microbatches import MicroBatch
from activities.training.watch import Watch
from configs.grpo import LossConfig


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch and the reference policy's log-probabilities, [rows, tokens].

    `reference` is None without a KL term, and off the last pipeline stage.
    """

    micro: MicroBatch
    reference: Tensor | None


@dataclass(frozen=True)
class LossOutputs:
    """What the loss of a micro-batch gave: its terms without gradient, and the facts of its rows, [rows, facts]."""

    terms: LossTerms
    facts: Tensor


@torch.no_grad()
def log_probabilities(
    model: DistributedDataParallel, micros: Sequence[MicroBatch], watch: Watch, phase: str
) -> list[Tensor | None]:
    """Log-probability of each label, [rows, tokens] per micro-batch; None where this is not the last stage."""

    def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
        assert non_loss_data
        return -output

    def forward(inputs: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        return _forward(model, next(inputs)), collect

    model.eval()
    results = _run(forward, model, _watched(micros, watch, phase), micros, forward_only=True)
    return results if parallel_state.is_pipeline_last_stage() else [None] * len(micros)


def gradients(
    model: DistributedDataParallel, inputs: Sequence[LossInputs], config: LossConfig, watch: Watch
) -> list[LossOutputs]:
    """Accumulate the gradient of the step's loss: the sum over all ranks and micro-batches, over the sum of counts.

    One result per micro-batch of this rank on the last pipeline stage; none elsewhere. The gradients must be clear.
    """

    def loss(inputs: LossInputs, output: Tensor) -> tuple[Tensor, Tensor, LossOutputs]:
        micro, curr = inputs.micro, -output
        terms = grpo_loss(
            curr=curr,
            # A batch gives one optimizer step, so this pass itself is the policy at the start of the step.
            prev=curr.detach(),
            generation=micro.generation_log_probs,
            reference=inputs.reference,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            weights=micro.weights,
            config=config,
        )
        outputs = LossOutputs(replace(terms, loss=terms.loss.detach()), row_facts(curr.detach(), micro, terms))
        return terms.loss, torch.tensor(micro.count, dtype=torch.int, device=output.device), outputs

    def forward(inputs: Iterator[LossInputs], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        item = next(inputs)
        return _forward(model, item.micro), partial(loss, item)

    model.train()
    return _run(forward, model, _watched(inputs, watch, "gradient"), [item.micro for item in inputs])


def _forward(model: Any, micro: MicroBatch) -> Tensor:
    return model(micro.tokens, micro.position_ids, None, labels=micro.labels)


def _watched(items: Sequence[Any], watch: Watch, phase: str) -> Iterator[Any]:
    """The items, each announced before it is used; one announcement before all where pipeline stages run apart."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        watch.reached(phase, 0, len(items))
        return iter(items)
    return _announced(items, watch, phase)


def _announced(items: Sequence[Any], watch: Watch, phase: str) -> Iterator[Any]:
    for i, item in enumerate(items):
        watch.reached(phase, i, len(items))
        yield item


def _run(
    forward: Callable[..., Any],
    model: DistributedDataParallel,
    items: Iterator[Any],
    micros: Sequence[MicroBatch],
    *,
    forward_only: bool = False,
) -> list[Any]:
    rows, tokens = micros[0].tokens.shape
    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=items,
        model=[model],
        num_microbatches=len(micros),
        seq_length=tokens,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
