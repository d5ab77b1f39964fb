"""The whole configuration of a run: one field per section, and the checks that cross sections."""

from pydantic import Field, model_validator

from configs.base import Section
from configs.failure import FailureConfig
from configs.generation import GenerationConfig
from configs.grpo import GrpoConfig
from configs.gym import GymConfig
from configs.logger import LoggerConfig
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
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Where metrics go.")
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
        if ahead and self.grpo.loss_fn.force_on_policy_ratio:
            raise ValueError(
                f"grpo.loss_fn.force_on_policy_ratio with rollouts.max_lookahead_versions ({ahead}): what is sampled "
                "ahead is of older policy versions, so the step is not on-policy; set force_on_policy_ratio: false, or "
                "max_lookahead_versions: 0"
            )
        return self

    @model_validator(mode="after")
    def _a_gap_is_an_error(self) -> "Recipe":
        """`training.max_logprob_gap` ends a step, so a gap must not have a reason other than a fault."""
        gap, rollouts = self.training.max_logprob_gap, self.rollouts
        if gap is not None and rollouts.max_lookahead_versions:
            raise ValueError(
                f"training.max_logprob_gap ({gap}) with rollouts.max_lookahead_versions "
                f"({rollouts.max_lookahead_versions}): log-probabilities of older policy versions differ because the "
                "policy has learned, not because something is wrong; leave max_logprob_gap out, or set "
                "max_lookahead_versions: 0"
            )
        if gap is not None and rollouts.top_p < 1:
            raise ValueError(
                f"training.max_logprob_gap ({gap}) with rollouts.top_p ({rollouts.top_p}): vLLM's log-probabilities "
                "are of the tokens that top_p leaves, the trainer's of all, so they always differ; leave "
                "max_logprob_gap out, or set top_p: 1"
            )
        return self

    @model_validator(mode="after")
    def _quarantine_is_seen(self) -> "Recipe":
        """Only the model server that records calls sends none to an endpoint in quarantine."""
        if self.generation.on_failed_endpoint == "quarantine" and self.rollouts.evidence == "response":
            raise ValueError(
                "generation.on_failed_endpoint: quarantine needs rollouts.evidence: ledger, whose model server leaves "
                "out endpoints in quarantine; set evidence: ledger, or on_failed_endpoint: wait"
            )
        return self

    @model_validator(mode="after")
    def _calls_can_be_seeded(self) -> "Recipe":
        """Only the model server that records calls seeds them."""
        seed = self.rollouts.sampling_seed
        if seed is not None and self.rollouts.evidence == "response":
            raise ValueError(
                f"rollouts.sampling_seed ({seed}) with rollouts.evidence: response: the agents' calls go to another "
                "model server, which does not seed them; set evidence: ledger, or leave sampling_seed out"
            )
        return self
