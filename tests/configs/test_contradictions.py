"""Options of the loss, the advantage and the trainer that contradict each other are refused when a recipe is read."""

import pytest
from pydantic import ValidationError

from configs.grpo import GrpoConfig, LossConfig
from configs.recipe import Recipe
from configs.training import TrainingConfig
from tests.configs.conftest import Problems

GSPO = "sequence_level_importance_ratios: true, token_level_loss: false"
TRUNCATED = "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2"
AHEAD = "rollouts: {max_lookahead_versions: 1}\n"


@pytest.mark.parametrize(
    ("options", "keys", "advice"),
    [
        (
            "sequence_level_importance_ratios: true",
            "sequence_level_importance_ratios with token_level_loss: true",
            "set token_level_loss: false",
        ),
        (
            f"{GSPO}, {TRUNCATED}, truncated_importance_sampling_ratio_min: 0.5, "
            "truncated_importance_sampling_type: seq-mask-tis",
            "truncated_importance_sampling_type: seq-mask-tis with sequence_level_importance_ratios",
            "use tis or icepop",
        ),
        (
            f"{TRUNCATED}, truncated_importance_sampling_type: icepop",
            "truncated_importance_sampling_type (icepop)",
            "set truncated_importance_sampling_ratio_min too",
        ),
        (
            f"{TRUNCATED}, truncated_importance_sampling_type: seq-mask-tis",
            "truncated_importance_sampling_type (seq-mask-tis)",
            "set truncated_importance_sampling_ratio_min too",
        ),
        ("disable_ppo_ratio: true, use_cispo: true", "use_cispo with disable_ppo_ratio", "keep one of them"),
        (
            "disable_ppo_ratio: true, force_on_policy_ratio: true",
            "disable_ppo_ratio with force_on_policy_ratio",
            "keep one of them",
        ),
        (
            f"disable_ppo_ratio: true, {GSPO}",
            "disable_ppo_ratio with sequence_level_importance_ratios",
            "keep one of them",
        ),
        ("disable_ppo_ratio: true, ratio_clip_c: 3", "disable_ppo_ratio with ratio_clip_c", "leave ratio_clip_c out"),
        ("use_cispo: true, ratio_clip_c: 3", "use_cispo with ratio_clip_c", "leave ratio_clip_c out"),
        ("use_cispo: true, force_on_policy_ratio: true", "use_cispo with force_on_policy_ratio", "keep one of them"),
        (f"use_cispo: true, {GSPO}", "use_cispo with sequence_level_importance_ratios", "keep one of them"),
        (
            "use_cispo: true, token_level_loss: false",
            "use_cispo with token_level_loss: false",
            "set token_level_loss: true",
        ),
        (
            "force_on_policy_ratio: true, ratio_clip_c: 3",
            "force_on_policy_ratio with ratio_clip_c",
            "leave ratio_clip_c out",
        ),
    ],
)
def test_options_of_the_loss(problems: Problems, options: str, keys: str, advice: str) -> None:
    [problem] = problems(f"grpo: {{loss_fn: {{{options}}}}}\n")

    assert problem.startswith("recipe.yaml: `grpo.loss_fn`: ")
    assert keys in problem
    assert advice in problem


@pytest.mark.parametrize(
    ("options", "keys", "advice"),
    [
        (
            "advantage_clip_low: 0, advantage_clip_high: -1",
            "advantage_clip_low (0.0) must not exceed advantage_clip_high (-1.0)",
            "",
        ),
        ("advantage_clip_low: 0.1", "advantage_clip_low (0.1) must not be above 0", "has the advantage 0"),
        ("advantage_clip_high: -0.1", "advantage_clip_high (-0.1) below", "has the advantage 0"),
        (
            "overlong_filtering: true, reward_shaping: {stop_properly_penalty_coef: 0.5}",
            "overlong_filtering with reward_shaping.stop_properly_penalty_coef",
            "keep one of them",
        ),
        (
            "use_dynamic_sampling: true, num_generations_per_prompt: 1",
            "use_dynamic_sampling with num_generations_per_prompt: 1",
            "raise num_generations_per_prompt",
        ),
    ],
)
def test_options_of_the_advantage_and_the_groups(problems: Problems, options: str, keys: str, advice: str) -> None:
    [problem] = problems(f"grpo: {{{options}}}\nrollouts: {{min_valid_rollouts_per_group: 1}}\n")

    assert problem.startswith("recipe.yaml: `grpo`: ")
    assert keys in problem
    assert advice in problem


@pytest.mark.parametrize(
    ("options", "keys", "advice"),
    [
        ("min_lr: 1.0e-8", "lr_decay_style: constant with lr_decay_steps (0) and min_lr (1e-08)", "linear or cosine"),
        ("lr_decay_steps: 9", "lr_decay_style: constant with lr_decay_steps (9) and min_lr (0.0)", "linear or cosine"),
        ("lr_decay_style: linear", "needs lr_decay_steps (0) above lr_warmup_steps (0)", "set lr_decay_steps"),
        (
            "lr_decay_style: cosine, lr_warmup_steps: 9, lr_decay_steps: 9",
            "lr_decay_style: cosine needs lr_decay_steps (9) above lr_warmup_steps (9)",
            "set lr_decay_steps",
        ),
        (
            "lr: 1.0e-6, min_lr: 1.0e-5, lr_decay_style: linear, lr_decay_steps: 9",
            "min_lr (1e-05) must not exceed lr (1e-06)",
            "a decay would raise the rate",
        ),
    ],
)
def test_options_of_the_learning_rate(problems: Problems, options: str, keys: str, advice: str) -> None:
    [problem] = problems(f"training: {{{options}}}\n")

    assert problem.startswith("recipe.yaml: `training`: ")
    assert keys in problem
    assert advice in problem


@pytest.mark.parametrize(
    ("text", "keys", "advice"),
    [
        (
            AHEAD + "grpo: {loss_fn: {use_importance_sampling_correction: true, force_on_policy_ratio: true}}\n",
            "grpo.loss_fn.force_on_policy_ratio with rollouts.max_lookahead_versions (1)",
            "set force_on_policy_ratio: false, or max_lookahead_versions: 0",
        ),
        (
            AHEAD + "grpo: {loss_fn: {use_importance_sampling_correction: true}}\ntraining: {max_logprob_gap: 0.1}\n",
            "training.max_logprob_gap (0.1) with rollouts.max_lookahead_versions (1)",
            "leave max_logprob_gap out, or set max_lookahead_versions: 0",
        ),
        (
            "rollouts: {top_p: 0.9}\ntraining: {max_logprob_gap: 0.1}\n",
            "training.max_logprob_gap (0.1) with rollouts.top_p (0.9)",
            "leave max_logprob_gap out, or set top_p: 1",
        ),
        (
            "rollouts: {evidence: response, sampling_seed: 7}\n",
            "rollouts.sampling_seed (7) with rollouts.evidence: response",
            "set evidence: ledger, or leave sampling_seed out",
        ),
        (
            "rollouts: {evidence: response}\ngeneration: {on_failed_endpoint: quarantine}\n",
            "generation.on_failed_endpoint: quarantine needs rollouts.evidence: ledger",
            "set evidence: ledger, or on_failed_endpoint: wait",
        ),
    ],
)
def test_options_of_different_sections(problems: Problems, text: str, keys: str, advice: str) -> None:
    [problem] = problems(text)

    assert keys in problem
    assert advice in problem


@pytest.mark.parametrize(
    "options",
    [
        {"use_cispo": True},
        {"sequence_level_importance_ratios": True, "token_level_loss": False, "force_on_policy_ratio": True},
        {"sequence_level_importance_ratios": True, "token_level_loss": False, "ratio_clip_c": 3.0},
        {"disable_ppo_ratio": True, "token_level_loss": False},
        {"disable_ppo_ratio": True, "use_importance_sampling_correction": True},
        {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.002,
            "truncated_importance_sampling_ratio_min": 0.999,
        },
    ],
)
def test_options_of_the_loss_that_belong_together_are_taken(options: dict[str, object]) -> None:
    assert LossConfig.model_validate(options).model_dump(exclude_defaults=True) == options


def test_the_published_recipes_of_the_methods_are_taken() -> None:
    """DAPO, GSPO and a decay of the rate, as their papers use them."""
    dapo = {
        "use_dynamic_sampling": True,
        "loss_fn": {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0},
        "reward_shaping": {"stop_properly_penalty_coef": 0.0},
    }
    gspo = {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "ratio_clip_min": 3e-4,
        "ratio_clip_max": 4e-4,
    }
    assert GrpoConfig.model_validate(dapo).loss_fn.token_level_loss
    assert not LossConfig.model_validate(gspo).token_level_loss
    TrainingConfig(lr_decay_style="cosine", lr_warmup_steps=10, lr_decay_steps=11, min_lr=1e-6)
    GrpoConfig(advantage_clip_low=0.0, advantage_clip_high=0.0)
    GrpoConfig(advantage_clip_low=-5.0)


def test_a_gap_may_end_a_step_where_nothing_else_explains_it() -> None:
    taken = {"run": {"model": "m", "dataset": "d"}, "training": {"max_logprob_gap": 0.1}}

    assert Recipe.model_validate(taken | {"rollouts": {"evidence": "response"}}).training.max_logprob_gap == 0.1
    with pytest.raises(ValidationError):
        Recipe.model_validate(taken | {"rollouts": {"top_p": 0.5}})
