"""The whole configuration of a run: one field per section, and the checks that cross sections."""

from pydantic import Field, model_validator

from configs.base import Section
from configs.failure import FailureConfig
from configs.generation import GenerationConfig
from configs.grpo import GrpoConfig
from configs.gym import GymConfig
from configs.rollouts import RolloutsConfig
from configs.run import RunConfig
from configs.storage import StorageConfig
from configs.temporal import TemporalConfig
from configs.training import TrainingConfig


class Recipe(Section):
    """What `onbelay run start` takes. A recipe is a YAML file of these sections."""

    run: RunConfig = Field(description="Which policy is trained on which prompts.")
    grpo: GrpoConfig = Field(default_factory=GrpoConfig, description="Step size, advantage, loss, evaluation.")
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig, description="Sampling, deadlines, concurrency.")
    failure: FailureConfig = Field(default_factory=FailureConfig, description="Retry and drop budgets.")
    generation: GenerationConfig = Field(default_factory=GenerationConfig, description="vLLM servers and refits.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="The Megatron-core trainer.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Ledger and blob store.")
    temporal: TemporalConfig = Field(default_factory=TemporalConfig, description="The Temporal service.")
    gym: GymConfig = Field(default_factory=GymConfig, description="NeMo-Gym servers.")

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        group, valid = self.grpo.num_generations_per_prompt, self.rollouts.min_valid_rollouts_per_group
        if valid > group:
            raise ValueError(
                f"rollouts.min_valid_rollouts_per_group ({valid}) exceeds grpo.num_generations_per_prompt ({group})"
            )
        if (self.grpo.val_period or self.grpo.val_at_start or self.grpo.val_at_end) and not self.run.validation_dataset:
            raise ValueError("grpo.val_* asks for evaluations: set run.validation_dataset")
        ahead = self.rollouts.max_lookahead_versions
        if ahead and not self.grpo.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                f"rollouts.max_lookahead_versions ({ahead}) trains on tokens of older policy versions: set "
                "grpo.loss_fn.use_importance_sampling_correction: true"
            )
        return self
