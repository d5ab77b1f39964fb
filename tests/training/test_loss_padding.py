"""What has mask 0 changes nothing, bit for bit: neither the loss, nor a metric, nor a gradient, whatever it holds."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from activities.training.loss import LossTerms, grpo_loss
from configs.grpo import LossConfig

BOUNDS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.3,
    "truncated_importance_sampling_ratio_min": 0.7,
}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "dual-clip": {"ratio_clip_c": 1.3},
    "cispo": {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "on-policy": {"force_on_policy_ratio": True},
    "gspo": GSPO | BOUNDS | {"truncated_importance_sampling_type": "tis"},
    "icepop": BOUNDS | {"truncated_importance_sampling_type": "icepop"},
    "seq-mask-tis": BOUNDS | {"truncated_importance_sampling_type": "seq-mask-tis"},
}


@dataclass(frozen=True)
class Inputs:
    """float32, [rows, tokens] each but the advantages, [rows, 1]. `policies`: curr, prev, generation, reference."""

    policies: tuple[Tensor, ...]
    advantages: Tensor
    mask: Tensor

    def loss(self, config: LossConfig) -> tuple[LossTerms, Tensor]:
        """The terms, and the gradient for `curr`."""
        curr, prev, generation, reference = self.policies
        curr = curr.clone().requires_grad_()
        weights = self.mask / self.mask.sum(dim=-1, keepdim=True).clamp(min=1)
        terms = grpo_loss(curr, prev, generation, reference, self.advantages, self.mask, weights, config)
        terms.loss.backward()
        assert curr.grad is not None
        return terms, curr.grad


def inputs(seed: int, rows: int = 3, tokens: int = 7) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    policies = tuple(-2 + 0.4 * torch.randn(rows, tokens, generator=generator) for _ in range(4))
    advantages = torch.randn(rows, 1, generator=generator)
    return Inputs(policies, advantages, (torch.rand(rows, tokens, generator=generator) < 0.6).float())


def numbers_of(terms: LossTerms) -> dict[str, float]:
    named = {"loss of the pass": terms.loss.detach(), **terms.sums, **terms.maxima, **terms.minima}
    return {name: value.item() for name, value in named.items()}


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), extra=st.integers(1, 5), junk=st.sampled_from([0.0, -1e30, math.nan, math.inf]))
def test_padding_rows_change_nothing(name: str, seed: int, extra: int, junk: float) -> None:
    config, plain = LossConfig.model_validate(CONFIGS[name]), inputs(seed)

    def with_rows(values: Tensor, value: float) -> Tensor:
        return torch.cat([values, torch.full((extra, values.shape[1]), value)])

    more = Inputs(
        tuple(with_rows(values, junk) for values in plain.policies),
        with_rows(plain.advantages, 0.0),
        with_rows(plain.mask, 0.0),
    )
    (terms, gradient), (padded, padded_gradient) = plain.loss(config), more.loss(config)

    assert numbers_of(padded) == numbers_of(terms)
    assert torch.equal(padded_gradient[:3], gradient)
    assert torch.equal(padded.row_losses[:3], terms.row_losses)
    assert not padded_gradient[3:].any()
    assert not padded.row_losses[3:].any()


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), junk=st.sampled_from([-1e30, math.nan, -math.inf]))
def test_what_a_masked_token_holds_changes_nothing(name: str, seed: int, junk: float) -> None:
    config, plain = LossConfig.model_validate(CONFIGS[name]), inputs(seed)

    def spoiled(values: Tensor) -> Tensor:
        return torch.where(plain.mask > 0, values, torch.tensor(junk))

    other = Inputs(
        tuple(spoiled(values) for values in plain.policies),
        plain.advantages,
        plain.mask,
    )
    (terms, gradient), (changed, changed_gradient) = plain.loss(config), other.loss(config)

    assert numbers_of(changed) == numbers_of(terms)
    assert torch.equal(changed_gradient, gradient)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_inputs_give_the_same_bits(name: str) -> None:
    config = LossConfig.model_validate(CONFIGS[name])
    (first, gradient), (second, again) = inputs(11).loss(config), inputs(11).loss(config)

    assert numbers_of(first) == numbers_of(second)
    assert torch.equal(gradient, again)
