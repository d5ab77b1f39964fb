"""The policy-gradient loss of each token, before importance weights and KL. All tensors are [rows, tokens] unless said.

`curr` has the gradient, `prev` is the trainer at the start of the step. The forms:

* PPO clip (arXiv:1707.06347), with two bounds (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729);
* GSPO (arXiv:2507.18071): one ratio per row, the exponential of the mean log-ratio over its masked tokens;
* CISPO (arXiv:2506.13585): the clipped ratio is a constant weight of the log-probability;
* REINFORCE (arXiv:2402.14740): the log-probability itself, without ratio and clip.
"""

import torch
from torch import Tensor

from configs.grpo import LossConfig


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[rows, 1] mean over the masked tokens of each row, added in float64; 0 for a row without any."""
    added = (values * mask).double().sum(dim=-1, keepdim=True)
    return (added / mask.double().sum(dim=-1, keepdim=True).clamp(min=1.0)).to(values.dtype)


def probability_ratio(curr: Tensor, prev: Tensor, mask: Tensor, config: LossConfig) -> Tensor:
    """exp(curr - prev) of each token, with its gradient; with GSPO that of its row, the same for each token of it.

    A ratio that is forced on-policy is 1 in value and has the gradient of one that is not.
    """
    log_ratio = curr - (curr.detach() if config.force_on_policy_ratio else prev)
    if config.sequence_level_importance_ratios:
        log_ratio = row_mean(log_ratio, mask).expand_as(curr)
    return torch.exp(log_ratio)


def clipped(ratio: Tensor, config: LossConfig) -> Tensor:
    """The ratio within [1 - ratio_clip_min, 1 + ratio_clip_max]."""
    return ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)


def policy_loss(curr: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """Loss of each token; `advantages` is broadcast. A token whose ratio is clipped has no gradient, save in CISPO."""
    if config.disable_ppo_ratio:
        return -advantages * curr
    if config.use_cispo:
        return -advantages * clipped(ratio, config).detach() * curr
    loss = torch.maximum(-advantages * ratio, -advantages * clipped(ratio, config))
    if config.ratio_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * config.ratio_clip_c), loss)
    return loss
