"""For every option, the gradient of a step is that of the formulas, computed again one token after the other."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from activities.training.batch import TrainingBatch, TrainingRow
from activities.training.loss import grpo_loss
from activities.training.microbatches import MicroBatch
from configs.grpo import LossConfig
from tests.training.plain_loss import PlainRow, step_loss
from tests.training.rollouts import passes

IMPORTANCE = {"use_importance_sampling_correction": True}
BOUNDS = {"truncated_importance_sampling_ratio": 1.3, "truncated_importance_sampling_ratio_min": 0.7}
GSPO = {"sequence_level_importance_ratios": True, "token_level_loss": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no-kl": {"reference_policy_kl_penalty": 0.0},
    "asymmetric-clip": {"ratio_clip_min": 0.1, "ratio_clip_max": 0.5},
    "dual-clip": {"ratio_clip_c": 1.3},
    "rollouts-count-once": {"token_level_loss": False},
    "cispo": {"use_cispo": True},
    "gspo": GSPO,
    "gspo-dual-clip": GSPO | {"ratio_clip_c": 1.1, "ratio_clip_max": 0.05},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce-rollouts-count-once": {"disable_ppo_ratio": True, "token_level_loss": False},
    "on-policy": {"force_on_policy_ratio": True},
    "on-policy-gspo": GSPO | {"force_on_policy_ratio": True},
    "k1": {"reference_policy_kl_type": "k1", "reference_policy_kl_penalty": 0.7},
    "k2": {"reference_policy_kl_type": "k2", "reference_policy_kl_penalty": 0.7},
    "k3": {"reference_policy_kl_type": "k3", "reference_policy_kl_penalty": 0.7},
    "kl-input-clamp": {"kl_input_clamp_value": 0.2, "reference_policy_kl_penalty": 0.7},
    "kl-output-clamp": {"kl_output_clamp_value": 0.05, "reference_policy_kl_penalty": 0.7},
    "importance": IMPORTANCE,
    "tis": IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "tis"},
    "icepop": IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "icepop"},
    "seq-mask-tis": IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "seq-mask-tis"},
    "gspo-importance": GSPO | IMPORTANCE,
    "gspo-tis": GSPO | IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "tis"},
    "gspo-icepop": GSPO | IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "icepop"},
    "on-policy-tis": {"force_on_policy_ratio": True}
    | IMPORTANCE
    | BOUNDS
    | {"truncated_importance_sampling_type": "tis"},
    "cispo-tis": {"use_cispo": True} | IMPORTANCE | BOUNDS | {"truncated_importance_sampling_type": "tis"},
}


@dataclass(frozen=True)
class Step:
    """A batch, and for each of its rows the log-probabilities [tokens - 1] of three policies."""

    batch: TrainingBatch
    curr: list[Tensor]
    prev: list[Tensor]
    reference: list[Tensor]


def step_of(seed: int, segments: list[int], longest: int = 9) -> Step:
    """A step of rollouts with so many rows each; the policies differ enough for every bound to act on some token."""
    rng = np.random.default_rng(seed)
    rows: list[TrainingRow] = []
    for rollout, many in enumerate(segments):
        advantage = float(rng.choice([-1.0, 1.0]) * rng.uniform(0.2, 2.0))
        for segment in range(many):
            length = int(rng.integers(2, longest))
            mask = (rng.random(length) < 0.6).astype(np.uint8)
            log_probs = np.where(mask == 1, -2 + 0.4 * rng.standard_normal(length), 0).astype(np.float32)
            tokens = rng.integers(0, 50, length).astype(np.int32)
            rows.append(TrainingRow(f"rollout-{rollout}", segment, tokens, mask, log_probs, advantage))

    def policy(gradient: bool = False) -> list[Tensor]:
        values = [
            torch.from_numpy(row.log_probs[1:].astype(np.float64) + 0.4 * rng.standard_normal(len(row.tokens) - 1))
            for row in rows
        ]
        return [value.requires_grad_(gradient) for value in values]

    return Step(TrainingBatch("run", 0, tuple(rows)), policy(gradient=True), policy(), policy())


def padded(micro: MicroBatch, values: list[Tensor]) -> Tensor:
    """[rows, tokens] of a micro-batch. What is no token of a row is not a number: nothing may read it."""
    width = micro.tokens.shape[1]
    nothing = torch.full((width,), math.nan, dtype=torch.float64)
    return torch.stack(
        [nothing if i is None else torch.cat([values[i], nothing[len(values[i]) :]]) for i in micro.rows]
    )


def gradients_of(step: Step, config: LossConfig, rows_per_pass: int, max_tokens: int, ranks: int) -> list[Tensor]:
    """The gradient for the log-probabilities of each row, added over all ranks and passes."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rank in range(ranks):
        for micro in passes(
            step.batch,
            rows_per_pass,
            token_level=config.token_level_loss,
            max_tokens=max_tokens,
            ranks=ranks,
            rank=rank,
        ):
            terms = grpo_loss(
                curr=padded(micro, step.curr),
                prev=padded(micro, step.prev),
                generation=micro.generation_log_probs.double(),
                reference=padded(micro, step.reference),
                advantages=micro.advantages.double(),
                mask=micro.loss_mask.double(),
                weights=micro.weights.double(),
                config=config,
            )
            total, count = total + terms.loss, count + micro.count
    return list(torch.autograd.grad(total / count, step.curr))


def plain_gradients_of(step: Step, config: LossConfig) -> list[Tensor]:
    rows: list[PlainRow] = []
    for index, row in enumerate(step.batch.rows):
        chosen = [t for t in range(len(row.tokens) - 1) if row.loss_mask[t + 1]]
        rows.append(
            PlainRow(
                rollout=row.rollout_id,
                advantage=float(np.float32(row.advantage)),
                curr=[step.curr[index][t] for t in chosen],
                prev=[step.prev[index][t].item() for t in chosen],
                generation=[float(row.log_probs[t + 1]) for t in chosen],
                reference=[step.reference[index][t].item() for t in chosen],
            )
        )
    loss = step_loss(rows, config)
    if not loss.requires_grad:  # every token is clipped
        return [torch.zeros_like(one) for one in step.curr]
    found = torch.autograd.grad(loss, step.curr, allow_unused=True)
    return [torch.zeros_like(step.curr[i]) if one is None else one for i, one in enumerate(found)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_is_that_of_the_formulas(name: str) -> None:
    config = LossConfig.model_validate(OPTIONS[name])
    plain = LossConfig()
    changed = False
    for seed in range(4):
        step = step_of(seed, segments=[1, 3, 1, 2, 1])
        found = gradients_of(step, config, rows_per_pass=2, max_tokens=12, ranks=2)
        assert_equal(found, plain_gradients_of(step, config))
        assert any(gradient.any() for gradient in found)
        changed |= not all(map(torch.equal, found, gradients_of(step, plain, 2, 12, 2)))
    assert changed is (name != "defaults")


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Options in any combination; those that contradict each other are not drawn."""
    return st.fixed_dictionaries(
        {},
        optional={
            "ratio_clip_min": st.floats(0.01, 0.9),
            "ratio_clip_max": st.floats(0.01, 2.0),
            "ratio_clip_c": st.floats(1.01, 3.0),
            "token_level_loss": st.booleans(),
            "sequence_level_importance_ratios": st.booleans(),
            "use_cispo": st.booleans(),
            "disable_ppo_ratio": st.booleans(),
            "force_on_policy_ratio": st.booleans(),
            "reference_policy_kl_penalty": st.floats(0.01, 1.0) | st.just(0.0),
            "reference_policy_kl_type": st.sampled_from(["k1", "k2", "k3"]),
            "kl_input_clamp_value": st.floats(0.1, 20.0),
            "kl_output_clamp_value": st.floats(0.01, 10.0),
            "use_importance_sampling_correction": st.booleans(),
            "truncated_importance_sampling_type": st.sampled_from(["tis", "icepop", "seq-mask-tis"]),
            "truncated_importance_sampling_ratio": st.floats(1.0, 3.0),
            "truncated_importance_sampling_ratio_min": st.floats(0.1, 1.0),
        },
    )


def allowed(drawn: dict[str, Any]) -> LossConfig | None:
    if "truncated_importance_sampling_type" not in drawn:
        drawn = {name: value for name, value in drawn.items() if not name.startswith("truncated_")}
    try:
        return LossConfig.model_validate(drawn)
    except ValidationError:
        return None


@settings(max_examples=60, deadline=None)
@given(
    options().map(allowed).filter(lambda config: config is not None),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(2, 40),
    st.integers(1, 3),
)
def test_gradient_is_that_of_the_formulas_for_any_mix_of_options(
    config: LossConfig, seed: int, segments: list[int], rows_per_pass: int, max_tokens: int, ranks: int
) -> None:
    step = step_of(seed, segments)
    assume(step.batch.trained_tokens)

    assert_equal(gradients_of(step, config, rows_per_pass, max_tokens, ranks), plain_gradients_of(step, config))


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(),
        LossConfig(token_level_loss=False),
        LossConfig(ratio_clip_c=1.2),
        LossConfig(use_cispo=True),
        LossConfig(disable_ppo_ratio=True, token_level_loss=False),
        LossConfig(use_importance_sampling_correction=True),
    ],
)
def test_a_rollout_in_three_segments_has_the_gradient_of_the_same_tokens_in_one(config: LossConfig) -> None:
    """Where no option looks at a whole row, a row is nothing but tokens: only what each was sampled after differs."""
    step = step_of(5, segments=[1, 1, 1], longest=20)
    assert all(row.trained_tokens for row in step.batch.rows)
    whole = max(range(3), key=lambda index: step.batch.rows[index].trained_tokens)
    places = [t for t, trains in enumerate(step.batch.rows[whole].loss_mask[1:]) if trains]
    rows: list[TrainingRow] = []
    owners: list[list[tuple[int, int]]] = []
    for index, row in enumerate(step.batch.rows):
        if index != whole:
            rows.append(row)
            owners.append([(index, t) for t in range(len(row.tokens) - 1)])
            continue
        for segment, chosen in enumerate(np.array_split(places, 3)):
            # The first token of each segment stands for everything that the policy reads before it.
            kept = [0, *(chosen + 1)]
            mask = np.array([0] + [1] * len(chosen), dtype=np.uint8)
            log_probs = np.where(mask == 1, row.log_probs[kept], 0).astype(np.float32)
            rows.append(TrainingRow(row.rollout_id, segment, row.tokens[kept], mask, log_probs, row.advantage))
            owners.append([(index, int(t)) for t in chosen])

    def cut(values: list[Tensor]) -> list[Tensor]:
        return [torch.stack([values[i][t] for i, t in owner]).detach() for owner in owners]

    curr = [value.requires_grad_() for value in cut(step.curr)]
    split = Step(TrainingBatch("run", 0, tuple(rows)), curr, cut(step.prev), cut(step.reference))

    one, three = gradients_of(step, config, 2, 1000, 1), gradients_of(split, config, 2, 1000, 1)

    for owner, gradient in zip(owners, three, strict=True):
        expected = torch.stack([one[i][t] for i, t in owner])
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


def test_with_gspo_each_segment_has_its_own_ratio() -> None:
    config = LossConfig.model_validate(GSPO | {"ratio_clip_max": 9.0, "reference_policy_kl_penalty": 0.0})
    step = step_of(7, segments=[3], longest=20)
    ratios = [
        torch.exp((step.curr[i] - step.prev[i])[torch.from_numpy(row.loss_mask[1:]) > 0].mean()).item()
        for i, row in enumerate(step.batch.rows)
    ]
    assert len(set(ratios)) == 3
    total = step.batch.trained_tokens

    found = gradients_of(step, config, 1, 1000, 1)

    for row, ratio, gradient in zip(step.batch.rows, ratios, found, strict=True):
        advantage = float(np.float32(row.advantage))
        bounded = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 10.0))
        expected = bounded / total if bounded == -advantage * ratio else 0.0
        assert gradient[gradient != 0].tolist() == pytest.approx([expected] * int((gradient != 0).sum()), rel=1e-6)
        assert int((gradient != 0).sum()) == (row.trained_tokens if expected else 0)
