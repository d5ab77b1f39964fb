"""The GRPO loss per token, as pure functions of log-probabilities. All tensors are [rows, tokens] unless said.

`curr` has the gradient, `prev` is the trainer at the start of the step, `generation` is vLLM, `reference` is policy
version 0. Formulas: NeMo-RL's clipped policy-gradient loss (PPO clip, dual clip of arXiv:1912.09729, truncated
importance sampling, KL estimators of Schulman, http://joschu.net/blog/kl-approx.html).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.grpo import LossConfig


@dataclass(frozen=True)
class LossTerms:
    """Sums over the masked tokens of some rows. Divide by the tokens of the whole step to get means."""

    loss: Tensor
    """Scalar with the gradient."""
    sums: dict[str, Tensor]
    """Scalars that are added over rows."""
    maxima: dict[str, Tensor]
    """Scalars of which the greatest over rows counts."""


def policy_loss(curr: Tensor, prev: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Clipped loss and ratio of each token; `advantages` is broadcast."""
    ratio = torch.exp(curr - prev)
    clipped = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if config.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.ratio_clip_c), loss)
    return loss, ratio


def importance_weights(prev: Tensor, generation: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token for sampling with another engine, after truncation; and where it was out of bounds."""
    raw = torch.nan_to_num(torch.exp(prev - generation), nan=0.0, posinf=0.0, neginf=0.0)
    if config.truncated_importance_sampling_type is None or config.truncated_importance_sampling_ratio is None:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    lowest = config.truncated_importance_sampling_ratio_min or 0.0
    highest = config.truncated_importance_sampling_ratio
    outside = (raw < lowest) | (raw > highest)
    if config.truncated_importance_sampling_type == "tis":
        return raw.clamp(lowest, highest), outside
    return torch.where(outside, torch.zeros_like(raw), raw), outside


def kl_estimate(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Estimate of KL(log_probs || reference) per token from samples of `log_probs`, without clamps."""
    return _kl(reference - log_probs, kind)


def _kl(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.exp(log_ratio) - 1.0 - log_ratio


def kl_penalty(curr: Tensor, reference: Tensor, config: LossConfig) -> Tensor:
    """Clamped KL of each token towards the reference, before its weight.

    The samples come from the policy itself, so the factor exp(curr - curr.detach()), of value 1, adds the gradient of
    the sampling probability (arXiv:2506.09477). A token whose log-ratio is clamped has no gradient.
    """
    raw = reference - curr
    log_ratio = raw.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    sampling = torch.exp(torch.where(raw == log_ratio, curr - curr.detach(), torch.zeros_like(curr)))
    kl = sampling * _kl(log_ratio, config.reference_policy_kl_type)
    return kl.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)


def grpo_loss(
    curr: Tensor,
    prev: Tensor,
    generation: Tensor,
    reference: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
) -> LossTerms:
    """Loss summed over the tokens with mask 1, and the sums of the metrics. `reference` None: no KL term."""
    actor, ratio = policy_loss(curr, prev, advantages, config)
    weights, outside = importance_weights(prev, generation, config)
    per_token = weights * actor if config.use_importance_sampling_correction else actor
    kl = None if reference is None else kl_penalty(curr, reference, config)
    if kl is not None:
        per_token = per_token + config.reference_policy_kl_penalty * kl
    loss = (per_token * mask).sum()
    with torch.no_grad():
        ratio, curr = ratio.detach(), curr.detach()
        clipped = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
        gap = (prev - generation).abs() * mask
        per_token_metrics = {
            "probs_ratio": ratio,
            "probs_ratio_clamped": clipped,
            "sampling_importance_ratio": weights,
            "token_mult_prob_error": torch.exp(gap),
            "gen_kl_error": kl_estimate(generation, prev, config.reference_policy_kl_type),
            "policy_kl_error": kl_estimate(prev, generation, config.reference_policy_kl_type),
            "approx_entropy": -torch.exp(curr - generation) * curr,
            "logprob_gap_mean": gap,
            "kl_penalty": torch.zeros_like(curr) if kl is None else kl.detach(),
        }
        if config.truncated_importance_sampling_type is not None:
            per_token_metrics["is_oob_ratio"] = outside.to(curr.dtype)
        selected = mask > 0
        sums = {name: value[selected].double().sum() for name, value in per_token_metrics.items()}
        sums["loss"] = loss.detach().double()
        maxima = {"logprob_gap_max": gap.max().double(), "probs_ratio_max": (ratio * mask).max().double()}
    return LossTerms(loss=loss, sums=sums, maxima=maxima)
