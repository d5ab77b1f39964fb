"""The loss of rows and the sums of its metrics. Golden numbers are in test_golden_numbers.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from activities.training.importance import importance_weights
from activities.training.kl import js_divergence, kl_estimate, kl_penalty
from activities.training.loss import LossTerms, grpo_loss, means
from activities.training.policy_loss import policy_loss, probability_ratio
from configs.grpo import LossConfig

NO_KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}


def row(*values: float, gradient: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=gradient)


def gradient_of(curr: Tensor) -> list[float]:
    assert curr.grad is not None
    return curr.grad[0].tolist()


def test_a_clipped_token_has_no_gradient() -> None:
    curr = row(math.log(1.5), gradient=True)
    ratio = probability_ratio(curr, row(0.0), row(1.0), LossConfig())

    policy_loss(curr, ratio, row(1.0), LossConfig()).sum().backward()

    assert gradient_of(curr) == [0]


def test_cispo_keeps_the_gradient_of_a_clipped_token_and_bounds_its_weight() -> None:
    curr, config = row(math.log(1.5), math.log(0.5), gradient=True), LossConfig(use_cispo=True)
    ratio = probability_ratio(curr, row(0.0, 0.0), row(1.0, 1.0), config)

    policy_loss(curr, ratio, row(2.0, -1.0), config).sum().backward()

    assert gradient_of(curr) == pytest.approx([-2.0 * 1.2, 0.8])


def test_without_a_ratio_the_gradient_is_the_advantage_however_old_the_policy() -> None:
    curr, config = row(-1.0, -2.0, gradient=True), LossConfig(disable_ppo_ratio=True)
    ratio = probability_ratio(curr, row(5.0, -9.0), row(1.0, 1.0), config)

    loss = policy_loss(curr, ratio, row(2.0, -3.0), config)
    loss.sum().backward()

    assert loss[0].tolist() == [2.0, -6.0]
    assert gradient_of(curr) == [-2.0, 3.0]


def test_a_ratio_that_is_forced_on_policy_is_one_and_has_a_gradient() -> None:
    curr, config = row(-1.0, gradient=True), LossConfig(force_on_policy_ratio=True, **NO_KL)

    terms = grpo_loss(curr, row(-9.0), row(-1.0), None, row(2.0), row(1.0), row(1.0), config)
    terms.loss.backward()

    assert terms.sums["probs_ratio"].item() == 1.0
    assert gradient_of(curr) == [-2.0]


def test_gspo_has_one_ratio_per_row_with_the_gradient_through_its_mean() -> None:
    config = LossConfig(sequence_level_importance_ratios=True, token_level_loss=False)
    curr = torch.tensor([[0.1, 0.05, 9.0], [0.3, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.float64)

    ratio = probability_ratio(curr, torch.zeros_like(curr), mask, config)
    (ratio * mask).sum().backward()

    first, second = math.exp(0.075), math.exp(0.3)
    assert ratio.detach().tolist() == [pytest.approx([first] * 3), pytest.approx([second] * 3)]
    assert curr.grad is not None
    assert curr.grad.tolist() == [pytest.approx([first, first, 0]), pytest.approx([second, 0, 0])]


def correction(kind: str | None, lowest: float | None, highest: float | None, **options: Any) -> LossConfig:
    return LossConfig.model_validate(
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": highest,
            "truncated_importance_sampling_ratio_min": lowest,
            **options,
        }
    )


@pytest.mark.parametrize(
    ("kind", "lowest", "highest", "expected", "outside"),
    [
        (None, None, None, 1.648721, False),
        ("tis", None, 2.0, 1.648721, False),
        ("tis", 2.0, 5.0, 2.0, True),
        ("icepop", 0.5, 2.0, 1.648721, False),
        ("icepop", 1.7, 2.0, 0.0, True),
        ("seq-mask-tis", 0.5, 2.0, 1.648721, False),
        ("seq-mask-tis", 0.999, 1.002, 0.0, True),
    ],
)
def test_importance_weight(
    kind: str | None, lowest: float | None, highest: float | None, expected: float, outside: bool
) -> None:
    weights, out_of_bounds = importance_weights(row(-1.0), row(-1.5), row(1.0), correction(kind, lowest, highest))

    assert weights.item() == pytest.approx(expected, abs=1e-6)
    assert out_of_bounds.item() is outside


def test_a_row_is_dropped_by_its_geometric_mean_and_a_kept_one_has_its_raw_weights() -> None:
    prev = torch.tensor([[0.5, -0.5, 7.0], [0.4, 0.4, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]], dtype=torch.float64)

    weights, outside = importance_weights(prev, torch.zeros_like(prev), mask, correction("seq-mask-tis", 0.9, 1.1))

    assert weights[:, :2].tolist() == [pytest.approx([math.exp(0.5), math.exp(-0.5)]), [0.0, 0.0]]
    assert outside[:, 0].tolist() == [False, True]


def test_with_gspo_the_importance_weight_is_that_of_the_whole_row() -> None:
    prev = torch.tensor([[0.2, 0.3, 9.0], [0.1, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.float64)
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}

    weights, _ = importance_weights(prev, torch.zeros_like(prev), mask, correction(None, None, None, **gspo))
    bounded, outside = importance_weights(prev, torch.zeros_like(prev), mask, correction("tis", None, 1.2, **gspo))

    assert weights[:, 0].tolist() == pytest.approx([math.exp(0.5), math.exp(0.1)])
    assert bounded[:, 0].tolist() == pytest.approx([1.2, math.exp(0.1)])
    assert outside[:, 0].tolist() == [True, False]


def test_an_importance_weight_that_is_not_finite_counts_nothing() -> None:
    weights, _ = importance_weights(row(0.0, 0.0), row(-2000.0, math.nan), row(1.0, 1.0), LossConfig())

    assert weights.tolist() == [[0.0, 0.0]]


def test_an_importance_weight_has_no_gradient() -> None:
    prev = row(-1.0, gradient=True)

    assert not importance_weights(prev, row(-1.5), row(1.0), correction("tis", None, 3.0))[0].requires_grad


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
    assert gradient_of(curr) == [pytest.approx(value + slope)]


def test_kl_has_no_gradient_where_the_log_ratio_is_clamped() -> None:
    curr = row(0.0, gradient=True)
    config = LossConfig(reference_policy_kl_type="k1", kl_input_clamp_value=2.0)

    kl_penalty(curr, row(5.0), config).sum().backward()

    assert gradient_of(curr) == [0]


def test_js_divergence_is_symmetric_and_zero_for_equal_log_probabilities() -> None:
    one, other = row(-1.0, -3.0), row(-1.0, -1.0)
    low, high = math.exp(-3.0), math.exp(-1.0)
    mixture = math.log((low + high) / 2)
    expected = sum(math.exp(value - mixture) - 1 - (value - mixture) for value in (-3.0, -1.0)) / 2

    assert js_divergence(one, other)[0].tolist() == pytest.approx([0.0, expected])
    assert torch.equal(js_divergence(one, other), js_divergence(other, one))


def at_ratio_one(advantages: list[float], masks: list[list[int]]) -> LossTerms:
    mask = torch.tensor(masks, dtype=torch.float64)
    zeros = torch.zeros_like(mask)
    column = torch.tensor(advantages, dtype=torch.float64)[:, None]
    return grpo_loss(zeros, zeros, zeros, None, column, mask, mask, LossConfig(**NO_KL))


def test_every_row_says_what_it_adds_to_the_loss() -> None:
    terms = at_ratio_one([1.0, -1.0, 5.0], [[1, 1, 1], [1, 0, 0], [0, 0, 0]])

    assert terms.row_losses.tolist() == [-3.0, 1.0, 0.0]
    assert terms.loss.item() == terms.sums["loss"].item() == -2.0


def test_all_advantages_zero_leaves_only_the_kl_term() -> None:
    curr, reference, mask = row(-1.0, -2.0), row(-1.5, -2.5), row(1.0, 1.0)
    config = LossConfig(reference_policy_kl_penalty=0.1)

    terms = grpo_loss(curr, curr, curr, reference, row(0.0), mask, mask, config)

    assert terms.loss.item() == pytest.approx(0.1 * 2 * (math.exp(-0.5) - 0.5))
    assert terms.sums["kl_penalty"].item() == pytest.approx(2 * (math.exp(-0.5) - 0.5))


def test_a_kl_term_without_a_reference_is_refused() -> None:
    one = row(1.0)

    with pytest.raises(ValueError, match=r"reference_policy_kl_penalty is 0.01, but the loss is given no log-prob"):
        grpo_loss(one, one, one, None, one, one, one, LossConfig())


def test_a_reference_without_a_penalty_changes_nothing() -> None:
    curr = row(-1.0)

    terms = grpo_loss(curr, curr, curr, row(-9.0), row(1.0), row(1.0), row(1.0), LossConfig(**NO_KL))

    assert (terms.loss.item(), terms.sums["kl_penalty"].item()) == (-1.0, 0.0)


def test_a_row_that_is_not_finite_is_named_by_its_loss() -> None:
    curr = torch.tensor([[-1.0, -1.0], [math.nan, -1.0]], dtype=torch.float64)
    mask, advantages = torch.ones(2, 2), torch.ones(2, 1)

    terms = grpo_loss(curr, curr, torch.zeros(2, 2).double(), None, advantages, mask, mask, LossConfig(**NO_KL))

    assert torch.isfinite(terms.row_losses).tolist() == [True, False]
    assert not math.isfinite(terms.loss.item())


def test_the_gap_between_engines_is_measured_over_sampled_tokens() -> None:
    curr, generation, mask = row(-1.0, -2.0, -3.0), row(-1.5, -2.0, 0.0), row(1.0, 1.0, 0.0)

    terms = grpo_loss(curr, curr, generation, None, row(1.0), mask, mask, LossConfig(**NO_KL))

    assert terms.maxima["logprob_gap_max"].item() == pytest.approx(0.5)
    assert terms.sums["logprob_gap_mean"].item() == pytest.approx(0.5)
    assert terms.sums["logprob_gap_kl"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert terms.sums["token_mult_prob_error"].item() == pytest.approx(math.exp(0.5) + 1)
    assert terms.sums["gen_kl_error"].item() == pytest.approx(math.exp(0.5) - 1 - 0.5)
    assert terms.sums["policy_kl_error"].item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    assert terms.sums["approx_entropy"].item() == pytest.approx(math.exp(0.5) + 2)


def test_extremes_of_ratios_are_over_sampled_tokens() -> None:
    curr, mask = row(math.log(0.5), math.log(1.1), 5.0), row(1.0, 1.0, 0.0)

    terms = grpo_loss(curr, row(0.0, 0.0, 0.0), curr, None, row(1.0), mask, mask, LossConfig(**NO_KL))

    found = {name: value.item() for name, value in (terms.maxima | terms.minima).items()}
    assert found == {
        "probs_ratio_max": pytest.approx(1.1),
        "probs_ratio_min": pytest.approx(0.5),
        "probs_ratio_clamped_max": pytest.approx(1.1),
        "probs_ratio_clamped_min": pytest.approx(0.8),
        "logprob_gap_max": pytest.approx(abs(math.log(0.5))),
    }


def test_rows_without_a_sampled_token_have_no_extremes_and_add_nothing() -> None:
    terms = at_ratio_one([3.0], [[0, 0]])

    assert set(terms.sums) == set(at_ratio_one([1.0], [[1, 1]]).sums)
    assert {value.item() for value in terms.sums.values()} == {0.0}
    assert {value.item() for value in terms.maxima.values()} == {-math.inf}
    assert {value.item() for value in terms.minima.values()} == {math.inf}


def metrics_of(config: LossConfig, denominator: int = 5) -> dict[str, float]:
    """Two rows of 2 and 3 tokens, advantages +1 and -1, in one pass."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.float64)
    prev = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.0, -1.0]], dtype=torch.float64)
    generation = prev - torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    column = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    terms = grpo_loss(prev, prev, generation, prev, column, mask, mask, config)
    sums = {name: value.item() for name, value in terms.sums.items()}
    return means(sums, trained_tokens=5, denominator=denominator, config=config)


def test_metrics_are_means_over_trained_tokens() -> None:
    metrics = metrics_of(correction("tis", None, 2.0))

    assert metrics["loss"] == pytest.approx((-2.0 - 1.0 + 3.0) / 5)
    assert metrics["probs_ratio"] == 1.0
    assert metrics["sampling_importance_ratio"] == pytest.approx((2.0 + 4.0) / 5)
    assert metrics["is_oob_ratio"] == pytest.approx(1 / 5)
    assert metrics["positive_nll_loss"] == pytest.approx(1.5)
    assert not {"rows", "positive_tokens"} & set(metrics)


def test_metrics_of_whole_rows_are_means_over_rows() -> None:
    filtered = metrics_of(correction("seq-mask-tis", 0.9, 1.1))
    gspo = metrics_of(
        correction(None, None, None, sequence_level_importance_ratios=True, token_level_loss=False), denominator=2
    )

    assert filtered["is_oob_ratio"] == 0.5
    assert filtered["sampling_importance_ratio"] == pytest.approx(3 / 5)
    assert gspo["sampling_importance_ratio"] == pytest.approx((math.e + 1) / 2)


def test_every_metric_is_there_whatever_is_on() -> None:
    assert set(metrics_of(LossConfig(**NO_KL))) == set(metrics_of(correction("seq-mask-tis", 0.9, 1.1)))


def test_a_step_without_a_positive_row_has_no_positive_loss() -> None:
    config = LossConfig(**NO_KL)
    terms = at_ratio_one([-1.0], [[1, 1]])
    sums = {name: value.item() for name, value in terms.sums.items()}

    assert means(sums, trained_tokens=2, denominator=2, config=config)["positive_nll_loss"] == 0.0
