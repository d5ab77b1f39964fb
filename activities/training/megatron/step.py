"""One optimizer step of one rank: filter, reference, gradient, verdict, update. Collective.

Nothing of the policy changes before the verdict: a step that is cancelled or refused leaves weights, optimizer state
and version as they were, bit for bit. A finished step returns all metrics, equal on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from activities.training.batch import TrainingBatch
from activities.training.megatron import faults
from activities.training.megatron.metrics import PhaseTimes, batch_metrics, bounded, filter_metrics, loss_metrics
from activities.training.megatron.optimizer import apply_gradients, clear_gradients, gradient_norm
from activities.training.megatron.passes import LossInputs, gradients, log_probabilities
from activities.training.megatron.policy import Policy
from activities.training.megatron.ranks import trainer_device
from activities.training.megatron.row_facts import gather_facts, gather_rows
from activities.training.megatron.schedule import learning_rate
from activities.training.microbatches import MicroBatch, micro_batches, padding_rows
from activities.training.row_filter import row_errors, without_rows
from activities.training.watch import Watch
from configs.grpo import GrpoConfig
from configs.training import TrainingConfig


@dataclass(frozen=True)
class Stepper:
    """What a step needs beside the batch."""

    policy: Policy
    training: TrainingConfig
    grpo: GrpoConfig
    watch: Watch

    def apply(self, batch: TrainingBatch) -> dict[str, float]:
        """Train one step on a batch that was checked; version + 1."""
        times, policy = PhaseTimes(), self.policy
        with times.measured("training_prep"):
            micros = self.micro_batches(batch)
        with times.measured("policy_and_reference_logprobs"):
            errors, dropped = self._filtered(batch, micros)
            kept = without_rows(batch, dropped)
            if dropped:
                micros = self.micro_batches(kept)
            inputs = [LossInputs(*pair) for pair in zip(micros, self._reference(micros), strict=True)]
        with times.measured("gradient"):
            clear_gradients(policy.wrapped, policy.optimizer)
            outputs = gradients(policy.wrapped, inputs, self.grpo.loss_fn, self.watch)
            metrics = loss_metrics(outputs, kept, self.grpo.loss_fn)
            facts = gather_facts([output.facts for output in outputs], micros, len(batch.rows))
            faults.check_loss(kept, policy.version, metrics["loss"], facts)
            faults.check_gaps(kept, policy.version, self.training.max_logprob_gap, facts)
            norm = gradient_norm(policy.optimizer)
            faults.check_norm(kept, policy.version, norm, partial(self._rows_with_bad_gradients, kept))
        rate = learning_rate(self.training, policy.version)
        with times.measured("optimizer"):
            apply_gradients(policy.optimizer, norm, rate)
        policy.version += 1
        quantum = self.training.train_micro_batch_size * self.training.data_parallel_size
        found = {
            **metrics,
            **batch_metrics(batch, kept),
            **filter_metrics(batch, facts.errors if errors is None else errors, dropped),
            "grad_norm": norm,
            "lr": rate,
            "wd": self.training.weight_decay,
            "padding_rows": float(padding_rows(len(batch.rows), quantum)),
            "micro_batches": float(len(micros)),
            **times.metrics(),
        }
        return bounded(found)

    def log_probabilities(self, batch: TrainingBatch) -> list[NDArray[np.float32]]:
        """[tokens] log-probabilities of each row, 0 for its first token; equal on all ranks."""
        micros = self.micro_batches(batch)
        found = log_probabilities(self.policy.wrapped, micros, self.watch, "previous")
        longest = max(len(row.tokens) for row in batch.rows)
        wide = [
            torch.nn.functional.pad(value, (1, longest - 1 - value.shape[1])) for value in found if value is not None
        ]
        gathered = gather_rows(wide, micros, len(batch.rows), longest).float().cpu().numpy()
        return [values[: len(row.tokens)] for values, row in zip(gathered, batch.rows, strict=True)]

    def micro_batches(self, batch: TrainingBatch, rows_per_pass: int | None = None) -> list[MicroBatch]:
        """The micro-batches of this data-parallel rank, padding rows left out where there are others."""
        made = micro_batches(
            batch,
            rows_per_pass=rows_per_pass or self.training.train_micro_batch_size,
            max_tokens=self.training.train_micro_batch_tokens,
            token_level=self.grpo.loss_fn.token_level_loss,
            data_parallel_size=self.training.data_parallel_size,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
            device=trainer_device(),
        )
        return [_without_padding(micro) for micro in made]

    def _filtered(self, batch: TrainingBatch, micros: list[MicroBatch]) -> tuple[list[float] | None, frozenset[int]]:
        """Error of each row, and the rows above the threshold; (None, none) without a threshold."""
        threshold = self.grpo.seq_logprob_error_threshold
        if threshold is None:
            return None, frozenset()
        previous = log_probabilities(self.policy.wrapped, micros, self.watch, "previous")
        own = [
            row_errors(log_probs, micro.generation_log_probs, micro.loss_mask)[:, None]
            for log_probs, micro in zip(previous, micros, strict=True)
            if log_probs is not None
        ]
        errors: list[float] = gather_rows(own, micros, len(batch.rows), 1)[:, 0].tolist()
        return errors, frozenset(row for row, error in enumerate(errors) if error > threshold)

    def _reference(self, micros: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Log-probabilities of version 0; None without a KL term."""
        if not self.policy.reference:
            return [None] * len(micros)
        with self.policy.as_version_0():
            return log_probabilities(self.policy.wrapped, micros, self.watch, "reference")

    def _rows_with_bad_gradients(self, batch: TrainingBatch) -> list[int]:
        policy = self.policy

        def run(micro: MicroBatch) -> None:
            clear_gradients(policy.wrapped, policy.optimizer)
            gradients(policy.wrapped, [LossInputs(micro, self._reference([micro])[0])], self.grpo.loss_fn, self.watch)

        def own_gradients() -> list[Tensor]:
            parameters: list[Any] = list(policy.model.parameters())
            return [parameter.main_grad for parameter in parameters]

        with faults.unreduced(policy.model.config):
            return faults.rows_with_bad_gradients(batch, self.micro_batches(batch, 1), run, own_gradients)


def _without_padding(micro: MicroBatch) -> MicroBatch:
    """The same pass without its padding rows, which come last; one stays where there is nothing else.

    A pass may have any number of rows. Padding rows would cost time, and their zeros would change the order in which a
    matrix product sums, and so the last bits of a gradient.
    """
    rows = max(1, sum(row is not None for row in micro.rows))
    if rows == len(micro.rows):
        return micro
    assert all(row is None for row in micro.rows[rows:])
    tensors = {name: value[:rows] for name, value in vars(micro).items() if isinstance(value, Tensor)}
    return replace(micro, rows=micro.rows[:rows], **tensors)
