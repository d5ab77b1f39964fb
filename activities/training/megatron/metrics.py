"""The metrics of a step, always all of them, equal on all ranks: exact sums first, then one division."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from activities.training.batch import TrainingBatch
from activities.training.loss import means
from activities.training.megatron.agreement import added, from_last_stage, greatest, greatest_of_all
from activities.training.megatron.passes import LossOutputs
from activities.training.megatron.ranks import trainer_device
from configs.grpo import LossConfig

PHASES = ("training_prep", "policy_and_reference_logprobs", "gradient", "optimizer")


class PhaseTimes:
    """Seconds that the phases of a step took; each phase is entered once."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measure what happens inside, on the device too."""
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """timing/<phase> of the slowest rank. Collective."""
        slowest = greatest_of_all(list(self._seconds.values()))
        return {f"timing/{phase}": value for phase, value in zip(self._seconds, slowest, strict=True)}


def loss_metrics(outputs: Sequence[LossOutputs], batch: TrainingBatch, config: LossConfig) -> dict[str, float]:
    """Means over the step of what the loss of each micro-batch summed, and the extremes. Collective.

    `batch` is what the gradient saw: its trained tokens, or rollouts, are the denominator.
    """
    terms = [output.terms for output in outputs]
    names = from_last_stage(sorted(terms[0].sums) if terms else [])
    highs = from_last_stage(sorted(terms[0].maxima) if terms else [])
    lows = from_last_stage(sorted(terms[0].minima) if terms else [])
    device = trainer_device()
    sums = torch.zeros(len(names), dtype=torch.float64, device=device)
    extremes = torch.full((len(highs) + len(lows),), -torch.inf, dtype=torch.float64, device=device)
    for term in terms:
        sums += torch.stack([term.sums[name] for name in names])
        largest = torch.stack([*(term.maxima[name] for name in highs), *(-term.minima[name] for name in lows)])
        extremes = torch.maximum(extremes, largest)
    totals = dict(zip(names, added(sums).tolist(), strict=True))
    bounds = greatest(extremes).tolist()
    denominator = batch.trained_tokens if config.token_level_loss else len(batch.trained_tokens_of)
    return {
        **means(totals, trained_tokens=batch.trained_tokens, denominator=denominator, config=config),
        **dict(zip(highs, bounds[: len(highs)], strict=True)),
        **{name: -value for name, value in zip(lows, bounds[len(highs) :], strict=True)},
    }


def bounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """What absurd log-probabilities make infinite or no number at all becomes the largest float: JSON knows neither."""
    largest = sys.float_info.max
    return {
        name: value if math.isfinite(value) else -largest if value == -math.inf else largest
        for name, value in metrics.items()
    }


def batch_metrics(whole: TrainingBatch, kept: TrainingBatch) -> dict[str, float]:
    """Metrics that need no model. `kept` is what is left of `whole` after the log-probability filter.

    `advantages/*` are over trained tokens.
    """
    trained = [row for row in kept.rows if row.trained_tokens]
    total = math.fsum(row.advantage * row.trained_tokens for row in trained)
    return {
        "global_valid_toks": float(kept.trained_tokens),
        "global_valid_seqs": float(len(trained)),
        "num_valid_samples": float(len(kept.trained_tokens_of)),
        "consumed_rollouts": float(whole.rollouts),
        "total_num_tokens": float(sum(len(row.tokens) for row in whole.rows)),
        "advantages/mean": total / kept.trained_tokens,
        "advantages/max": max(row.advantage for row in trained),
        "advantages/min": min(row.advantage for row in trained),
    }


def filter_metrics(whole: TrainingBatch, errors: Sequence[float], dropped: frozenset[int]) -> dict[str, float]:
    """Errors between vLLM and trainer, over the rows that had something to train, before and after the filter."""
    trained = [index for index, row in enumerate(whole.rows) if row.trained_tokens]
    correct = sum(whole.rows[index].advantage > 0 for index in dropped)
    return {
        **_spread([errors[index] for index in trained], ""),
        **_spread([errors[index] for index in trained if index not in dropped], "_after_mask"),
        "num_masked_seqs_by_logprob_error": float(len(dropped)),
        "masked_correct_pct": correct / len(dropped) if dropped else 0.0,
    }


def _spread(values: list[float], suffix: str) -> dict[str, float]:
    return {
        f"max_seq_mult_prob_error{suffix}": max(values),
        f"mean_seq_mult_prob_error{suffix}": sum(values) / len(values),
        f"min_seq_mult_prob_error{suffix}": min(values),
    }
