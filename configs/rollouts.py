"""`rollouts`: sampling, deadlines, concurrency, and what an attempt may take over from the attempts before it."""

from typing import Literal

from pydantic import Field, model_validator

from configs.base import Section

RecoveryMode = Literal["replay", "fresh", "none"]


class RecoveryConfig(Section):
    """What a later attempt does. A task's mode counts over its agent's, and that over the default."""

    default: RecoveryMode = Field(
        default="replay",
        description="replay: answer from what is recorded, then go on; fresh: sample everything again; "
        "none: tools must not run twice, so the first failure loses the rollout.",
    )
    agents: dict[str, RecoveryMode] = Field(
        default_factory=dict, description="Modes of agents, by the name that rows use."
    )
    tasks: dict[str, RecoveryMode] = Field(
        default_factory=dict, description="Modes of tasks, by the `task_name` of a row."
    )


class RolloutsConfig(Section):
    """How one rollout is run. Deadlines are finite by default."""

    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature, put into every row.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling, put into every row.")
    sampling_seed: int | None = Field(
        default=None,
        ge=0,
        description="Seeds every model call, together with the rollout's place in the run and the call's prompt: "
        "two runs with one seed sample the same, whatever failed in either (but vLLM may round differently where it "
        "batches differently). The Gym servers read it when they start. null: calls are not seeded.",
    )
    max_output_tokens: int = Field(
        default=8192, ge=1, description="Most tokens of one model call; a row may ask for fewer."
    )
    rollout_timeout_s: float = Field(
        default=3600.0, gt=0, description="Deadline of one attempt, from the request to the agent's answer."
    )
    heartbeat_timeout_s: float = Field(
        default=60.0, gt=0, description="A rollout worker that is silent for so long is taken for dead."
    )
    max_concurrent_rollouts: int = Field(default=256, ge=1, description="Rollouts in flight in one rollout worker.")
    max_response_bytes: int = Field(
        default=256 * 2**20, ge=2**10, description="Largest /run answer that is read; a longer one fails the attempt."
    )
    min_valid_rollouts_per_group: int = Field(
        default=2, ge=1, description="A group with fewer valid rollouts is dropped or parked."
    )
    evidence: Literal["ledger", "response"] = Field(
        default="ledger",
        description="What trains: the calls that the model server recorded, or the tokens in the agent's own answer "
        "(for agents behind another model server; their calls cannot be replayed).",
    )
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig, description="What a later attempt does.")
    max_replay_age_versions: int = Field(
        default=1,
        ge=0,
        description="Recorded responses of weights older than the step's version by more than this are not replayed.",
    )
    max_lookahead_versions: int = Field(
        default=0,
        ge=0,
        description="Steps whose groups are sampled ahead of the one that trains (NeMo-RL's `in_order` sampler). "
        "Above 0, grpo.loss_fn.use_importance_sampling_correction must be on.",
    )
    shutdown_grace_s: float = Field(
        default=30.0, gt=0, description="A worker that stops gives its rollouts so long, then hands them over."
    )
    on_content_failure: Literal["mask", "resample"] = Field(
        default="mask",
        description="A prompt that is too long, a context guard's refusal, a reply without tokens: mask the rollout, "
        "or try a fresh sample within failure.max_data_attempts_per_prompt.",
    )
    truncate_noncontiguous_episodes: bool = Field(
        default=False,
        description="With evidence: response, train what came before the first prompt that rewrites earlier tokens, "
        "instead of failing.",
    )

    @model_validator(mode="after")
    def _heartbeat_fits(self) -> "RolloutsConfig":
        if self.heartbeat_timeout_s > self.rollout_timeout_s:
            raise ValueError(
                f"heartbeat_timeout_s ({self.heartbeat_timeout_s}) must not exceed "
                f"rollout_timeout_s ({self.rollout_timeout_s})"
            )
        return self

    @model_validator(mode="after")
    def _lookahead_can_be_replayed(self) -> "RolloutsConfig":
        ahead = self.max_lookahead_versions
        if ahead and self.evidence == "response":
            raise ValueError(
                f"max_lookahead_versions ({ahead}) needs evidence: ledger: only recorded calls know the policy version "
                "that sampled them"
            )
        if self.max_replay_age_versions < ahead:
            raise ValueError(
                f"max_replay_age_versions ({self.max_replay_age_versions}) must not be below max_lookahead_versions "
                f"({ahead}): what is sampled ahead could never be replayed"
            )
        return self

    @model_validator(mode="after")
    def _only_answers_are_truncated(self) -> "RolloutsConfig":
        if self.truncate_noncontiguous_episodes and self.evidence == "ledger":
            raise ValueError(
                "truncate_noncontiguous_episodes does not go with evidence: ledger, whose calls are exact, so that "
                "there is nothing to truncate; use evidence: response"
            )
        return self
