"""`grpo`: how many prompts and rollouts make a step, the advantage, the loss, and when to evaluate.

Key names and defaults are NeMo-RL's wherever the thing exists there.
"""

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Section


class LossConfig(Section):
    """The policy-gradient loss with a penalty towards the reference policy."""

    ratio_clip_min: float = Field(default=0.2, gt=0, lt=1, description="Lower clip: the ratio is kept above 1 - this.")
    ratio_clip_max: float = Field(default=0.2, gt=0, description="Upper clip: the ratio is kept below 1 + this.")
    ratio_clip_c: float | None = Field(
        default=None, gt=1, description="Dual clip: bounds the loss of negative advantages at -advantage * this."
    )
    token_level_loss: bool = Field(
        default=True,
        description="Mean over all tokens of the step; false: mean over the rollouts' own means.",
    )
    sequence_level_importance_ratios: bool = Field(
        default=False, description="GSPO: one ratio per row, the exponential of its mean log-ratio."
    )
    use_cispo: bool = Field(
        default=False, description="CISPO: the clipped ratio is a constant weight of the log-probability's gradient."
    )
    disable_ppo_ratio: bool = Field(
        default=False, description="No ratio and no clip: the loss is -advantage * log-probability."
    )
    force_on_policy_ratio: bool = Field(
        default=False, description="The ratio is 1 in value, whatever the log-probabilities at the start of the step."
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
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = Field(
        default=None,
        description="tis clamps the weight to the bounds, icepop drops tokens outside them, seq-mask-tis drops rows "
        "whose mean weight (geometric) is outside.",
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
        if kind in ("icepop", "seq-mask-tis") and lower is None:
            raise ValueError(
                f"truncated_importance_sampling_type ({kind}) drops what is outside its bounds: set "
                "truncated_importance_sampling_ratio_min too (0 for none)"
            )
        return self

    @model_validator(mode="after")
    def _one_ratio(self) -> "LossConfig":
        """Options that define the ratio in different ways, or act on one that is not there."""
        for wrong, keys, reason in (
            (
                self.sequence_level_importance_ratios and self.token_level_loss,
                "sequence_level_importance_ratios with token_level_loss: true",
                "a ratio of a whole row belongs to a mean over rollouts; set token_level_loss: false",
            ),
            (
                self.sequence_level_importance_ratios and self.truncated_importance_sampling_type == "seq-mask-tis",
                "truncated_importance_sampling_type: seq-mask-tis with sequence_level_importance_ratios",
                "it keeps the weights of single tokens, and there is only one weight of a row; use tis or icepop",
            ),
            (
                self.disable_ppo_ratio and self.sequence_level_importance_ratios,
                "disable_ppo_ratio with sequence_level_importance_ratios",
                "one takes the ratio away that the other defines; keep one of them",
            ),
            (
                self.disable_ppo_ratio and self.force_on_policy_ratio,
                "disable_ppo_ratio with force_on_policy_ratio",
                "one takes the ratio away that the other sets to 1; keep one of them",
            ),
            (
                self.disable_ppo_ratio and self.ratio_clip_c is not None,
                "disable_ppo_ratio with ratio_clip_c",
                "without a ratio there is nothing to clip; leave ratio_clip_c out",
            ),
            (
                self.use_cispo and self.disable_ppo_ratio,
                "use_cispo with disable_ppo_ratio",
                "CISPO's weight is the clipped ratio; keep one of them",
            ),
            (
                self.use_cispo and self.force_on_policy_ratio,
                "use_cispo with force_on_policy_ratio",
                "a ratio of 1 leaves CISPO without its weight; keep one of them",
            ),
            (
                self.use_cispo and self.sequence_level_importance_ratios,
                "use_cispo with sequence_level_importance_ratios",
                "CISPO's weight is the ratio of a token; keep one of them",
            ),
            (
                self.use_cispo and self.ratio_clip_c is not None,
                "use_cispo with ratio_clip_c",
                "CISPO's weight is clipped already, and its loss has no ratio to bound; leave ratio_clip_c out",
            ),
            (
                self.use_cispo and not self.token_level_loss,
                "use_cispo with token_level_loss: false",
                "CISPO is a mean over the tokens of the step; set token_level_loss: true",
            ),
            (
                self.force_on_policy_ratio and self.ratio_clip_c is not None,
                "force_on_policy_ratio with ratio_clip_c",
                "a ratio of 1 is never clipped; leave ratio_clip_c out",
            ),
        ):
            if wrong:
                raise ValueError(f"{keys}: {reason}")
        return self


class RewardShapingConfig(Section):
    """What is made of a reward before the advantage. The ledger keeps the environment's."""

    stop_properly_penalty_coef: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Factor on the reward of a rollout whose last reply was cut off by a token limit; null: as it is.",
    )


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
    advantage_clip_low: float | None = Field(default=None, description="Lowest advantage; null: no bound.")
    advantage_clip_high: float | None = Field(default=None, description="Highest advantage; null: no bound.")
    reward_shaping: RewardShapingConfig = Field(
        default_factory=RewardShapingConfig, description="Rewards as the advantage sees them."
    )
    use_dynamic_sampling: bool = Field(
        default=False,
        description="DAPO: a group whose rewards are all equal is set aside, and another prompt takes its place.",
    )
    dynamic_sampling_max_gen_batches: int = Field(
        default=10, ge=1, description="A step samples at most this many times its prompts; then the run ends."
    )
    seq_logprob_error_threshold: float | None = Field(
        default=None,
        ge=1,
        description="Rows whose mean exp(|generation - trainer| log-probability) exceeds this do not train.",
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

    @model_validator(mode="after")
    def _advantage_bounds_enclose_zero(self) -> "GrpoConfig":
        low, high = self.advantage_clip_low, self.advantage_clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"advantage_clip_low ({low}) must not exceed advantage_clip_high ({high})")
        if (low or 0.0) > 0 or (high or 0.0) < 0:
            raise ValueError(
                f"advantage_clip_low ({low}) must not be above 0, nor advantage_clip_high ({high}) below: a rollout no "
                "better or worse than its group has the advantage 0, and would be given another"
            )
        return self

    @model_validator(mode="after")
    def _truncated_rollouts_are_masked_or_shaped(self) -> "GrpoConfig":
        if self.overlong_filtering and self.reward_shaping.stop_properly_penalty_coef is not None:
            raise ValueError(
                "overlong_filtering with reward_shaping.stop_properly_penalty_coef: the rollouts whose reward the one "
                "shapes are masked by the other, and a masked reward counts nothing; keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_differ(self) -> "GrpoConfig":
        if self.use_dynamic_sampling and self.num_generations_per_prompt == 1:
            raise ValueError(
                "use_dynamic_sampling with num_generations_per_prompt: 1: the rewards of a group of one are always "
                "equal, so every group would be set aside; raise num_generations_per_prompt"
            )
        return self
