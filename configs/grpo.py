"""`grpo`: how many prompts and rollouts make a step, the advantage, the loss, and when to evaluate.

Key names and defaults are NeMo-RL's wherever the thing exists there.
"""

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Section


class LossConfig(Section):
    """The clipped token-level policy-gradient loss with a penalty towards the reference policy."""

    ratio_clip_min: float = Field(default=0.2, gt=0, lt=1, description="Lower clip: the ratio is kept above 1 - this.")
    ratio_clip_max: float = Field(default=0.2, gt=0, description="Upper clip: the ratio is kept below 1 + this.")
    ratio_clip_c: float | None = Field(
        default=None, gt=1, description="Dual clip: bounds the loss of negative advantages at -advantage * this."
    )
    reference_policy_kl_penalty: float = Field(
        default=0.01, ge=0, description="Weight of the KL term towards policy version 0. 0 skips the reference pass."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the KL term (Schulman's k1, k2, k3)."
    )
    kl_input_clamp_value: float = Field(default=20.0, gt=0, description="The log-ratio is clamped to +- this.")
    kl_output_clamp_value: float = Field(default=10.0, gt=0, description="The KL of a token is clamped to +- this.")
    use_importance_sampling_correction: bool = Field(
        default=False,
        description="Weigh each token by exp(trainer log-probability - generation log-probability).",
    )
    truncated_importance_sampling_type: Literal["tis", "icepop"] | None = Field(
        default=None, description="tis clamps the weight to the bounds, icepop drops tokens outside them."
    )
    truncated_importance_sampling_ratio: float | None = Field(
        default=None, gt=0, description="Upper bound of the importance weight."
    )
    truncated_importance_sampling_ratio_min: float | None = Field(
        default=None, ge=0, description="Lower bound of the importance weight."
    )

    @model_validator(mode="after")
    def _bounds_belong_to_a_correction(self) -> "LossConfig":
        kind, upper = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        lower = self.truncated_importance_sampling_ratio_min
        if kind and (upper is None or not self.use_importance_sampling_correction):
            raise ValueError(
                f"truncated_importance_sampling_type ({kind}) needs use_importance_sampling_correction: true "
                "and truncated_importance_sampling_ratio"
            )
        if not kind and (upper is not None or lower is not None):
            raise ValueError("truncated_importance_sampling_ratio(_min) needs truncated_importance_sampling_type")
        if upper is not None and lower is not None and lower > upper:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min ({lower}) must not exceed "
                f"truncated_importance_sampling_ratio ({upper})"
            )
        return self


class GrpoConfig(Section):
    """Group-relative policy optimisation."""

    num_prompts_per_step: int = Field(default=32, ge=1, description="Prompt groups in one step.")
    num_generations_per_prompt: int = Field(default=16, ge=1, description="Rollouts in one prompt group.")
    max_num_steps: int = Field(default=1_000_000, ge=1, description="The run ends after this many optimizer steps.")
    seed: int = Field(default=42, ge=0, description="Order of the prompts; also the seed of the trainer.")
    normalize_rewards: bool = Field(default=True, description="Divide the advantage by the group's standard deviation.")
    use_leave_one_out_baseline: bool = Field(
        default=True, description="Baseline and standard deviation of a rollout leave that rollout out."
    )
    advantage_std_epsilon: float = Field(
        default=1e-6,
        gt=0,
        description="Added to the standard deviation. A larger value keeps nearly equal groups from shouting.",
    )
    overlong_filtering: bool = Field(
        default=False, description="Mask a rollout whose last reply was cut off by a token limit."
    )
    loss_fn: LossConfig = Field(default_factory=LossConfig, description="The loss.")
    val_period: int = Field(default=0, ge=0, description="Evaluate after every so many steps; 0: not on a schedule.")
    val_at_start: bool = Field(default=False, description="Evaluate policy version 0.")
    val_at_end: bool = Field(default=False, description="Evaluate the last policy version.")
    max_val_samples: int = Field(
        default=64, ge=1, description="Validation prompts of one evaluation, one rollout each."
    )
