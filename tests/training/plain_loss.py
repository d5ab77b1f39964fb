"""The loss of a step once more, from the formulas alone: one token after the other, in float64.

It shares no code with `activities.training`; PyTorch only differentiates it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.grpo import LossConfig


@dataclass(frozen=True)
class PlainRow:
    """A row by the tokens that train. `curr` holds scalars with the gradient, the others plain numbers."""

    rollout: str
    advantage: float
    curr: list[Tensor]
    prev: list[float]
    generation: list[float]
    reference: list[float]


def step_loss(rows: list[PlainRow], config: LossConfig) -> Tensor:
    """Mean over all tokens, or over the rollouts of their means over all tokens of all their rows."""
    losses: dict[str, list[Tensor]] = {}
    for row in rows:
        if row.curr:
            losses.setdefault(row.rollout, []).extend(row_losses(row, config))
    if config.token_level_loss:
        tokens = [one for of_rollout in losses.values() for one in of_rollout]
        return sum_of(tokens) / len(tokens)
    return sum_of([sum_of(of_rollout) / len(of_rollout) for of_rollout in losses.values()]) / len(losses)


def sum_of(values: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value
    return total


def row_losses(row: PlainRow, config: LossConfig) -> list[Tensor]:
    """The loss of each token of a row."""
    tokens = range(len(row.curr))
    start = [value.item() for value in row.curr] if config.force_on_policy_ratio else row.prev
    log_ratios = [row.curr[t] - start[t] for t in tokens]
    if config.sequence_level_importance_ratios:
        log_ratios = [sum_of(log_ratios) / len(log_ratios)] * len(log_ratios)
    weights = importance(row, start, config)
    losses: list[Tensor] = []
    for t in tokens:
        loss = weights[t] * actor(row.curr[t], torch.exp(log_ratios[t]), row.advantage, config)
        if config.reference_policy_kl_penalty:
            loss = loss + config.reference_policy_kl_penalty * kl(row.curr[t], row.reference[t], config)
        losses.append(loss)
    return losses


def actor(curr: Tensor, ratio: Tensor, advantage: float, config: LossConfig) -> Tensor:
    """The policy loss of a token."""
    if config.disable_ppo_ratio:
        return -advantage * curr
    lowest, highest = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    value = ratio.item()
    inside = min(max(value, lowest), highest)
    if config.use_cispo:
        return -advantage * inside * curr
    # The worse of the plain and the clipped loss; a clipped ratio is a number without a gradient.
    loss = -advantage * ratio if -advantage * value >= -advantage * inside else torch.tensor(-advantage * inside)
    c = config.ratio_clip_c
    if c is not None and advantage < 0 and loss.item() > -advantage * c:
        loss = torch.tensor(-advantage * c, dtype=torch.float64)
    return loss


def importance(row: PlainRow, start: list[float], config: LossConfig) -> list[float]:
    """The importance weight of each token of a row."""
    if not config.use_importance_sampling_correction:
        return [1.0] * len(start)
    gaps = [start[t] - row.generation[t] for t in range(len(start))]
    raw = [math.exp(gap) for gap in gaps]
    if config.sequence_level_importance_ratios:
        raw = [math.exp(math.fsum(gaps))] * len(gaps)
    kind, highest = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    if kind is None or highest is None:
        return raw
    lowest = config.truncated_importance_sampling_ratio_min or 0.0
    if kind == "tis":
        return [min(max(weight, lowest), highest) for weight in raw]
    if kind == "icepop":
        return [weight if lowest <= weight <= highest else 0.0 for weight in raw]
    kept = lowest <= math.exp(math.fsum(gaps) / len(gaps)) <= highest
    return [weight if kept else 0.0 for weight in raw]


def kl(curr: Tensor, reference: float, config: LossConfig) -> Tensor:
    """The KL term of a token: value k, and the gradient k * d(log-probability) + dk; none where a clamp acts."""
    raw = reference - curr.item()
    bound, kind = config.kl_input_clamp_value, config.reference_policy_kl_type
    log_ratio = reference - curr
    if abs(raw) > bound:
        log_ratio = torch.tensor(math.copysign(bound, raw), dtype=torch.float64)
    value = {
        "k1": -log_ratio,
        "k2": log_ratio * log_ratio / 2,
        "k3": torch.exp(log_ratio) - 1 - log_ratio,
    }[kind]
    if abs(value.item()) > config.kl_output_clamp_value:
        return torch.tensor(math.copysign(config.kl_output_clamp_value, value.item()), dtype=torch.float64)
    if abs(raw) > bound:
        return value
    return value + value.item() * (curr - curr.item())
