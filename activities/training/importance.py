"""Weights for sampling with another engine than the one that trains. All tensors are [rows, tokens] unless said.

`prev` is the trainer at the start of the step, `generation` is vLLM. A weight has no gradient. Truncated importance
sampling (tis) and the two filters are NeMo-RL's: icepop drops tokens, seq-mask-tis drops rows.
"""

import torch
from torch import Tensor

from activities.training.policy_loss import row_mean
from configs.grpo import LossConfig


def importance_weights(prev: Tensor, generation: Tensor, mask: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token after truncation, and where (bool) it was out of bounds.

    exp(prev - generation) of a token; with GSPO of its row, exp of the sum over the masked tokens. A weight that is
    not finite counts 0. seq-mask-tis bounds the row's geometric mean, and leaves the weights of a kept row as they are.
    """
    log_ratio = (prev - generation).detach()
    if config.sequence_level_importance_ratios:
        row_sum = (log_ratio * mask).double().sum(dim=-1, keepdim=True)
        raw = _finite(torch.exp(row_sum).to(prev.dtype)).expand_as(prev)
    else:
        raw = _finite(torch.exp(log_ratio))
    kind, highest = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    if kind is None or highest is None:
        return raw, torch.zeros_like(raw, dtype=torch.bool)
    lowest = config.truncated_importance_sampling_ratio_min or 0.0
    judged = raw
    if kind == "seq-mask-tis":
        judged = torch.exp(row_mean(_finite(log_ratio), mask)).expand_as(prev)
    outside = (judged < lowest) | (judged > highest)
    if kind == "tis":
        return raw.clamp(lowest, highest), outside
    return torch.where(outside, torch.zeros_like(raw), raw), outside


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
