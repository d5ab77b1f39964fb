"""The loss per token. Golden numbers computed by hand from NeMo-RL's formulas."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from activities.training.loss import LossTerms, grpo_loss, importance_weights, kl_estimate, kl_penalty, policy_loss
from configs.grpo import LossConfig


def row(*values: float, gradient: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=gradient)


@pytest.mark.parametrize(
    ("advantage", "ratio", "options", "expected"),
    [
        (1, 1.5, {}, -1.2),
        (1, 0.5, {}, -0.5),
        (-1, 1.5, {}, 1.5),
        (-1, 0.5, {}, 0.8),
        (-1, 5.0, {}, 5.0),
        (-1, 5.0, {"ratio_clip_c": 3.0}, 3.0),
        (-1, 2.0, {"ratio_clip_c": 3.0}, 2.0),
        (1, 1.5, {"ratio_clip_c": 3.0}, -1.2),
        (1, 1.5, {"ratio_clip_max": 0.28}, -1.28),
    ],
)
def test_clipped_loss(advantage: float, ratio: float, options: dict[str, Any], expected: float) -> None:
    loss, seen = policy_loss(row(math.log(ratio)), row(0.0), row(advantage), LossConfig(**options))

    assert loss.item() == pytest.approx(expected)
    assert seen.item() == pytest.approx(ratio)


def test_a_clipped_token_has_no_gradient() -> None:
    curr = row(math.log(1.5), gradient=True)

    policy_loss(curr, row(0.0), row(1.0), LossConfig())[0].sum().backward()

    assert curr.grad is not None
    assert curr.grad.item() == 0


@pytest.mark.parametrize(
    ("kind", "highest", "lowest", "expected", "outside"),
    [
        (None, None, None, 1.648721, False),
        ("tis", 1.2, None, 1.2, True),
        ("tis", 2.0, None, 1.648721, False),
        ("tis", 5.0, 2.0, 2.0, True),
        ("icepop", 1.2, 0.5, 0.0, True),
        ("icepop", 2.0, 0.5, 1.648721, False),
    ],
)
def test_importance_weight(
    kind: str | None, highest: float | None, lowest: float | None, expected: float, outside: bool
) -> None:
    config = LossConfig.model_validate(
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": highest,
            "truncated_importance_sampling_ratio_min": lowest,
        }
    )

    weights, out_of_bounds = importance_weights(row(-1.0), row(-1.5), config)

    assert weights.item() == pytest.approx(expected, abs=1e-6)
    assert out_of_bounds.item() is outside


def test_an_importance_weight_that_is_not_finite_counts_nothing() -> None:
    weights, _ = importance_weights(row(0.0, 0.0), row(-2000.0, math.nan), LossConfig())

    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "log_ratio", "expected"),
    [
        ("k1", 1.0, -1.0),
        ("k2", 1.0, 0.5),
        ("k3", 1.0, 0.718282),
        ("k1", -1.0, 1.0),
        ("k2", -1.0, 0.5),
        ("k3", -1.0, 0.367879),
        ("k1", 25.0, -10.0),
        ("k2", 25.0, 10.0),
        ("k3", 25.0, 10.0),
    ],
)
def test_kl_penalty(kind: str, log_ratio: float, expected: float) -> None:
    config = LossConfig.model_validate({"reference_policy_kl_type": kind})

    assert kl_penalty(row(0.0), row(log_ratio), config).item() == pytest.approx(expected, abs=1e-6)


def test_kl_estimate_has_no_clamps() -> None:
    assert kl_estimate(row(0.0), row(25.0), "k1").item() == -25.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_includes_the_sampling_probability(kind: str) -> None:
    """d/dx of exp(x - sg(x)) * k(x): the estimate itself, and its slope."""
    curr, reference = row(-1.0, gradient=True), row(-1.5)
    config = LossConfig.model_validate({"reference_policy_kl_type": kind})

    kl_penalty(curr, reference, config).sum().backward()

    log_ratio = -0.5
    value = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[kind]
    slope = {"k1": 1.0, "k2": -log_ratio, "k3": 1 - math.exp(log_ratio)}[kind]
    assert curr.grad is not None
    assert curr.grad.item() == pytest.approx(value + slope)


def test_kl_has_no_gradient_where_the_log_ratio_is_clamped() -> None:
    curr = row(0.0, gradient=True)
    config = LossConfig(reference_policy_kl_type="k1", kl_input_clamp_value=2.0)

    kl_penalty(curr, row(5.0), config).sum().backward()

    assert curr.grad is not None
    assert curr.grad.item() == 0


def at_ratio_one(advantages: list[float], masks: list[list[int]]) -> LossTerms:
    mask = torch.tensor(masks, dtype=torch.float64)
    zeros = torch.zeros_like(mask)
    column = torch.tensor(advantages, dtype=torch.float64)[:, None]
    return grpo_loss(zeros, zeros, zeros, None, column, mask, LossConfig())


def test_every_token_has_the_same_weight() -> None:
    terms = at_ratio_one([1.0, -1.0], [[1, 1, 1], [1, 0, 0]])

    assert terms.loss.item() / 4 == pytest.approx(-0.5)


def test_segments_share_their_rollouts_advantage_and_padding_is_neutral() -> None:
    """A group of two: one rollout in segments of 5 and 3 tokens, the other with 2 tokens, and a padding row."""
    terms = at_ratio_one([1.0, 1.0, -1.0, 0.0], [[1] * 5, [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0] * 5])

    assert terms.loss.item() / 10 == pytest.approx(-0.6)


def test_all_advantages_zero_leaves_only_the_kl_term() -> None:
    curr, reference, mask = row(-1.0, -2.0), row(-1.5, -2.5), row(1.0, 1.0)
    config = LossConfig(reference_policy_kl_penalty=0.1)

    terms = grpo_loss(curr, curr, curr, reference, row(0.0), mask, config)

    assert terms.loss.item() == pytest.approx(0.1 * 2 * (math.exp(-0.5) - 0.5))
    assert terms.sums["kl_penalty"].item() == pytest.approx(2 * (math.exp(-0.5) - 0.5))


def test_importance_weights_change_the_loss_only_when_asked() -> None:
    curr, generation = row(-1.0), row(-1.5)

    def loss(config: LossConfig) -> float:
        return grpo_loss(curr, curr, generation, None, row(1.0), row(1.0), config).loss.item()

    assert loss(LossConfig()) == -1.0
    assert loss(LossConfig(use_importance_sampling_correction=True)) == pytest.approx(-1.648721, abs=1e-6)


def test_the_gap_between_engines_is_measured_over_sampled_tokens() -> None:
    curr, generation, mask = row(-1.0, -2.0, -3.0), row(-1.5, -2.0, 0.0), row(1.0, 1.0, 0.0)

    terms = grpo_loss(curr, curr, generation, None, row(1.0), mask, LossConfig())

    assert terms.maxima["logprob_gap_max"].item() == pytest.approx(0.5)
    assert terms.sums["logprob_gap_mean"].item() == pytest.approx(0.5)
    assert terms.sums["token_mult_prob_error"].item() == pytest.approx(math.exp(0.5) + 1)
    assert terms.sums["gen_kl_error"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert terms.sums["approx_entropy"].item() == pytest.approx(math.exp(0.5) + 2)


def plain_loss(config: LossConfig) -> Callable[..., float]:
    """The same loss with one Python number at a time."""

    def token(curr: float, prev: float, generation: float, reference: float, advantage: float) -> float:
        ratio = math.exp(curr - prev)
        clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
        loss = max(-advantage * ratio, -advantage * clipped)
        if config.ratio_clip_c is not None and advantage < 0:
            loss = min(loss, -advantage * config.ratio_clip_c)
        if config.use_importance_sampling_correction:
            loss *= min(math.exp(prev - generation), config.truncated_importance_sampling_ratio or math.inf)
        log_ratio = reference - curr
        return loss + config.reference_policy_kl_penalty * (math.exp(log_ratio) - 1 - log_ratio)

    return token


def test_loss_equals_the_same_sum_in_plain_python() -> None:
    generator = torch.Generator().manual_seed(5)
    config = LossConfig(
        ratio_clip_c=3.0,
        reference_policy_kl_penalty=0.05,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.5,
    )
    curr, prev, generation, reference = (
        -2 + torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).double()

    terms = grpo_loss(curr, prev, generation, reference, advantages, mask, config)

    token = plain_loss(config)
    expected = math.fsum(
        token(*(float(part[i, j]) for part in (curr, prev, generation, reference)), float(advantages[i, 0]))
        for i, j in mask.nonzero().tolist()
    )
    assert terms.loss.item() == pytest.approx(expected, rel=1e-12)
