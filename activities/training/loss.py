"""The GRPO loss of some rows, as a pure function of log-probabilities. All tensors are [rows, tokens] unless said.

`curr` has the gradient, `prev` is the trainer at the start of the step, `generation` is vLLM, `reference` is policy
version 0. loss = sum over tokens of weight * (importance weight * policy loss + penalty * KL), in NeMo-RL's terms.
Rows without a token of mask 1 are left out first, and what else has mask 0 is replaced by zeros: neither changes a
value or a gradient by a bit, whatever it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from activities.training.importance import importance_weights
from activities.training.kl import js_divergence, kl_estimate, kl_penalty
from activities.training.policy_loss import clipped, policy_loss, probability_ratio
from configs.grpo import LossConfig


@dataclass(frozen=True)
class LossTerms:
    """What some rows add to a step. Add `sums` over rows and ranks; `means` makes the metrics of them."""

    loss: Tensor
    """Scalar with the gradient: divide by the denominator of the step."""
    sums: dict[str, Tensor]
    """float64 scalars that are added over rows."""
    maxima: dict[str, Tensor]
    """float64 scalars of which the greatest over rows counts; -inf without a masked token."""
    minima: dict[str, Tensor]
    """float64 scalars of which the least over rows counts; +inf without a masked token."""
    row_losses: Tensor
    """[rows] what each row adds to the loss, without gradient."""


def grpo_loss(
    curr: Tensor,
    prev: Tensor,
    generation: Tensor,
    reference: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    config: LossConfig,
) -> LossTerms:
    """Loss summed over the tokens with mask 1, each counted with its weight; `advantages` is [rows, 1].

    `weights` is the mask, or the mask divided by the trained tokens of the rollout (sequence-level loss).

    Raises:
        ValueError: the loss has a KL term, but no reference log-probabilities are given.
    """
    if config.reference_policy_kl_penalty and reference is None:
        raise ValueError(
            f"grpo.loss_fn.reference_policy_kl_penalty is {config.reference_policy_kl_penalty}, but the loss is given "
            "no log-probabilities of the reference policy."
        )
    trains = (mask > 0).any(dim=-1)
    row_losses = torch.zeros_like(curr.detach()[:, 0])
    curr, prev, generation, advantages, mask, weights = (
        value[trains] for value in (curr, prev, generation, advantages, mask, weights)
    )
    selected = mask > 0
    zero = torch.zeros((), dtype=curr.dtype, device=curr.device)
    curr, prev, generation = (torch.where(selected, value, zero) for value in (curr, prev.detach(), generation))
    if config.force_on_policy_ratio:
        prev = curr.detach()
    ratio = probability_ratio(curr, prev, mask, config)
    importance, outside = importance_weights(prev, generation, mask, config)
    per_token = policy_loss(curr, ratio, advantages, config)
    if config.use_importance_sampling_correction:
        per_token = importance * per_token
    kl = torch.zeros_like(curr)
    if reference is not None and config.reference_policy_kl_penalty:
        kl = kl_penalty(curr, torch.where(selected, reference[trains], zero), config)
        per_token = per_token + config.reference_policy_kl_penalty * kl
    weighted = torch.where(selected, weights * per_token, zero)
    loss = weighted[selected].double().sum()
    row_losses[trains] = weighted.detach().sum(dim=-1)
    ratio = ratio.detach()
    bounded, gap = clipped(ratio, config), (prev - generation).abs()
    distances = _distances(curr.detach(), prev, generation, config)
    positive = (advantages > 0).expand_as(mask) & selected
    per_token_sums = distances | {
        "probs_ratio": ratio,
        "probs_ratio_clamped": bounded,
        "logprob_gap_mean": gap,
        "kl_penalty": weights * kl.detach(),
        "positive_nll_loss": torch.where(positive, -curr.detach(), zero),
        POSITIVE_TOKENS: positive,
    }
    sums = {name: value[selected].double().sum() for name, value in per_token_sums.items()}
    by_row = {
        "sampling_importance_ratio": (importance, config.sequence_level_importance_ratios),
        "is_oob_ratio": (outside, config.truncated_importance_sampling_type == "seq-mask-tis"),
    }
    for name, (value, of_rows) in by_row.items():
        sums[name] = (value[:, 0] if of_rows else value[selected]).double().sum()
    return LossTerms(
        loss=loss.to(curr.dtype),
        sums=sums | {ROWS: trains.double().sum(), "loss": loss.detach()},
        maxima={
            "probs_ratio_max": _greatest(ratio[selected]),
            "probs_ratio_clamped_max": _greatest(bounded[selected]),
            "logprob_gap_max": _greatest(gap[selected]),
        },
        minima={
            "probs_ratio_min": -_greatest(-ratio[selected]),
            "probs_ratio_clamped_min": -_greatest(-bounded[selected]),
        },
        row_losses=row_losses,
    )


def _distances(curr: Tensor, prev: Tensor, generation: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """How far the trainer is from vLLM, [rows, tokens] each; the definitions are NeMo-RL's.

    `token_mult_prob_error` exp(|prev - generation|); `gen_kl_error` and `policy_kl_error` the estimates of
    KL(vLLM || trainer) and KL(trainer || vLLM) of the configured kind, `logprob_gap_kl` the former always as k3;
    `approx_entropy` -(trainer / vLLM) * log(trainer), the entropy of the trainer by importance sampling.
    """
    kind = config.reference_policy_kl_type
    return {
        "token_mult_prob_error": torch.exp((prev - generation).abs()),
        "gen_kl_error": kl_estimate(generation, prev, kind),
        "policy_kl_error": kl_estimate(prev, generation, kind),
        "js_divergence_error": js_divergence(prev, generation),
        "logprob_gap_kl": kl_estimate(generation, prev, "k3"),
        "approx_entropy": -torch.exp(curr - generation) * curr,
    }


ROWS, POSITIVE_TOKENS = "rows", "positive_tokens"
"""Sums that are denominators: rows with a masked token, and masked tokens of rows with a positive advantage."""


def means(sums: Mapping[str, float], *, trained_tokens: int, denominator: int, config: LossConfig) -> dict[str, float]:
    """The metrics of a step from the sums over all its rows, `trained_tokens` of them masked tokens.

    `denominator` is what the loss is divided by: the trained tokens or rollouts of the step. `loss` and `kl_penalty`
    have it; `positive_nll_loss` is a mean over the tokens of rows with a positive advantage (0 without any); a weight
    or bound of whole rows is a mean over rows; all others are means over trained tokens.
    """
    over: dict[str, float] = {"loss": denominator, "kl_penalty": denominator}
    over["positive_nll_loss"] = max(sums[POSITIVE_TOKENS], 1.0)
    if config.sequence_level_importance_ratios:
        over["sampling_importance_ratio"] = sums[ROWS]
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        over["is_oob_ratio"] = sums[ROWS]
    return {
        name: value / over.get(name, trained_tokens)
        for name, value in sums.items()
        if name not in (ROWS, POSITIVE_TOKENS)
    }


def _greatest(values: Tensor) -> Tensor:
    if values.numel() == 0:
        return torch.full((), -torch.inf, dtype=torch.float64, device=values.device)
    return values.max().double()
