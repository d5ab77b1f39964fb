"""The gradient of a step equals one that is computed apart: in float64, with Transformers, row by row, by the formulas.

The engine works in float32, which leaves a difference of 3e-7 to 5e-7 of the gradient's norm; TOLERANCE is what is
allowed of it, and of the loss.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from activities.training.batch import TrainingBatch, TrainingRow
from configs.grpo import LossConfig
from tests.training.samples import exact_model, gradients_of, log_probs_of, make_batch, new_engine, write_model

TOLERANCE = 1e-6

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token level": ({}, {}),
    "sequence level": ({"token_level_loss": False}, {}),
    "gspo": ({"sequence_level_importance_ratios": True, "token_level_loss": False}, {}),
    "cispo": ({"use_cispo": True}, {}),
    "no ratio": ({"disable_ppo_ratio": True}, {}),
    "kl": ({"reference_policy_kl_penalty": 0.5}, {}),
    "kl, sequence level": ({"reference_policy_kl_penalty": 0.5, "token_level_loss": False}, {}),
    "tis": (
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.2,
            "truncated_importance_sampling_ratio_min": 0.8,
        },
        {},
    ),
    "log-probability filter": ({}, {"seq_logprob_error_threshold": 1.65}),
    "temperature": ({"reference_policy_kl_penalty": 0.5}, {"temperature": 0.7}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in ("qwen3-tied", "llama-untied")}


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_equals_the_float64_formula(
    folders: dict[str, Path], tmp_path: Path, kind: str, case: str
) -> None:
    options, others = CASES[case]
    loss = LossConfig.model_validate({"reference_policy_kl_penalty": 0.0} | options)
    engine = new_engine(loss, max_grad_norm=1e9, **others)
    engine.load_model(folders[kind])
    engine.train(make_batch(0))  # moves away from the reference policy
    engine.export(tmp_path / "now")

    metrics = engine.train(make_batch(1))

    policy, reference = exact_model(tmp_path / "now"), exact_model(folders[kind])
    value = expected_loss(policy, reference, make_batch(1), loss, **others)
    value.backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    found = gradients_of(engine)
    assert found.keys() == expected.keys()
    assert metrics["loss"] == pytest.approx(value.item(), abs=TOLERANCE)
    assert distance(found, expected) < TOLERANCE
    assert metrics["grad_norm"] == pytest.approx(norm_of(expected), rel=TOLERANCE)


def expected_loss(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    batch: TrainingBatch,
    loss: LossConfig,
    temperature: float = 1.0,
    seq_logprob_error_threshold: float = math.inf,
) -> Tensor:
    """The loss of a step by its definition, in float64."""
    by_rollout: dict[str, list[Tensor]] = {}
    filtered = 0
    for row in batch.rows:
        curr, generation = sampled(policy, row, temperature)
        if torch.exp((generation - curr).abs()).mean() > seq_logprob_error_threshold:
            filtered += 1
            continue
        per_token = policy_term(curr, float(torch.tensor(row.advantage, dtype=torch.float32)), loss)
        if loss.use_importance_sampling_correction:
            lowest, highest = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
            weight = torch.exp(curr.detach() - generation)
            assert lowest is not None
            assert highest is not None
            assert (weight < lowest).any() or (weight > highest).any()
            per_token = weight.clamp(lowest, highest) * per_token
        if loss.reference_policy_kl_penalty:
            with torch.no_grad():
                fixed, _ = sampled(reference, row, temperature)
            sampling = torch.exp(curr - curr.detach())
            estimate = torch.exp(fixed - curr) - 1 - (fixed - curr)
            per_token = per_token + loss.reference_policy_kl_penalty * sampling * estimate
        by_rollout.setdefault(row.rollout_id, []).append(per_token)
    assert 0 < filtered < len(batch.rows) or seq_logprob_error_threshold == math.inf
    rollouts = [torch.cat(parts) for parts in by_rollout.values()]
    if loss.token_level_loss:
        return torch.cat(rollouts).mean()
    return torch.stack([tokens.mean() for tokens in rollouts]).mean()


def sampled(model: PreTrainedModel, row: TrainingRow, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that were sampled, by the model and as recorded, both float64."""
    mask = torch.from_numpy(row.loss_mask)[1:] > 0
    return log_probs_of(model, row.tokens, temperature)[mask], torch.from_numpy(row.log_probs)[1:][mask].double()


def policy_term(curr: Tensor, advantage: float, loss: LossConfig) -> Tensor:
    """[tokens] loss without penalty and weights. The policy at the start of the step is the policy itself."""
    if loss.disable_ppo_ratio:
        return -advantage * curr
    moved = curr - curr.detach()
    ratio = torch.exp(moved.mean().expand_as(moved) if loss.sequence_level_importance_ratios else moved)
    clipped = ratio.clamp(1 - loss.ratio_clip_min, 1 + loss.ratio_clip_max)
    if loss.use_cispo:
        return -advantage * clipped.detach() * curr
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def norm_of(gradients: dict[str, Any]) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))


def distance(found: dict[str, Tensor], expected: dict[str, Any]) -> float:
    """Norm of the difference over the norm of what is expected, over all parameters."""
    difference = {name: found[name].double() - expected[name] for name in found}
    return norm_of(difference) / norm_of(expected)
