"""Distances between policies, per token, from log-probabilities of sampled tokens; all tensors are [rows, tokens].

k1, k2 and k3 are Schulman's estimators (http://joschu.net/blog/kl-approx.html).
"""

import math

import torch
from torch import Tensor

from configs.grpo import LossConfig


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


def js_divergence(log_probs: Tensor, other: Tensor) -> Tensor:
    """Jensen-Shannon divergence per token: the mean of the k3 estimates from each of the two towards their mixture.

    With M = (p + q) / 2 and r = log p - log M: k3 = e^r - 1 - r (NeMo-RL's `js_divergence_error`).
    """
    mixture = torch.logaddexp(log_probs, other) - math.log(2.0)
    return 0.5 * (_kl(log_probs - mixture, "k3") + _kl(other - mixture, "k3"))
