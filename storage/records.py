"""What the ledger takes and returns: plain frozen records, never rows bound to a session.

A record equals what is stored at the time it was read; changing a run means calling the ledger, not a record.
"""

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

Purpose = Literal["train", "validation", "diagnostic"]
RunState = Literal["running", "paused", "completed", "stopped", "failed", "terminated"]
GroupState = Literal["open", "sealed", "parked", "dropped", "set_aside", "trained"]
RolloutState = Literal["open", "valid", "masked", "lost"]
AttemptState = Literal["running", "settled", "failed", "abandoned"]
Bucket = Literal["infra", "data"]
Boundary = Literal["agent", "environment", "model", "ledger", "trainer", "generation"]
Recovery = Literal["replay", "fresh", "none"]
Continuity = Literal["root", "append", "new_segment"]
CallOutcome = Literal["generated", "replayed", "failed", "measured", "reported"]
ActionOutcome = Literal["done", "unchanged", "refused"]


class Record(BaseModel):
    """Base of all records: unknown fields are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)


class RunRecord(Record):
    """A run as it was started, and how it stands."""

    run_id: str
    task_queue: str
    state: RunState
    reason: str | None
    recipe: dict[str, JsonValue]
    dataset_digest: str
    dataset_rows: int
    model_digest: str
    created_at: datetime
    updated_at: datetime


class Claim(Record):
    """One row of the dataset, reserved for one slot of one step. `position` counts the claims of the run."""

    step: int
    slot: int
    position: int
    row_index: int
    prompt_id: str


class AttemptRecord(Record):
    """One try at a rollout. `abandoned`: a later attempt began, or the rollout was given up, before it ended; in a
    diagnostic copy, whatever the original's attempt settled, or failed for in its data.
    `fresh_reason`: why it began a new sample instead of replaying."""

    rollout_id: str
    attempt: int
    state: AttemptState
    worker: str
    sample: int = 0
    fresh_reason: str | None = None
    boundary: Boundary | None
    bucket: Bucket | None
    failure_class: str | None
    cause: str | None
    started_at: datetime
    ended_at: datetime | None


class RolloutRecord(Record):
    """A rollout and all its attempts, oldest first."""

    rollout_id: str
    group_id: str
    index: int
    state: RolloutState
    current_attempt: int | None
    settled_attempt: int | None
    reward: float | None
    truncated: bool
    reason: str | None
    policy_version_min: int | None
    policy_version_max: int | None
    evidence_digest: str | None
    segments: int
    settled_at: datetime | None
    attempts: tuple[AttemptRecord, ...]


class GroupRecord(Record):
    """A prompt group and its rollouts, by index.

    `train_step` is the step that trains it: earlier than `step` once it was promoted. `replaces` is the group whose
    place it took, `copy_of` the original of a diagnostic copy, `ended_order` its place among the train groups of the
    run that have ended.
    """

    group_id: str
    run_id: str
    step: int
    slot: int
    purpose: Purpose
    prompt_id: str
    row_index: int
    num_rollouts: int
    state: GroupState
    bucket: Bucket | None
    reason: str | None
    train_step: int
    replaces: str | None
    copy_of: str | None
    ended_order: int | None
    created_at: datetime
    updated_at: datetime
    rollouts: tuple[RolloutRecord, ...]


class Place(Record):
    """A slot of a step and the group that stands for it now; `used` counts the replacements that led to it.

    None: the slot's prompt has no group yet. A group that trains in another step was lent and not yet repaid, and one
    that was set aside carries no signal: the place needs a fresh prompt that replaces it. A group of another step was
    promoted into this one.
    """

    slot: int
    group: GroupRecord | None
    used: int


class SetAsideGroup(Record):
    """A group whose valid rollouts all have this reward, so that none of them has an advantage."""

    group_id: str
    reward: float


class BudgetCounts(Record):
    """Drop counters: train groups dropped for the infrastructure since the last one that ended well (kept, or set
    aside), and train groups dropped for their data in the life of the run."""

    consecutive_drops: int
    skipped_prompts: int


class ActionRecord(Record):
    """One request of an operator and what became of it. `at` is the ledger's clock."""

    action_id: str
    run_id: str
    target: str
    verb: str
    actor: str
    reason: str
    arguments: dict[str, JsonValue]
    outcome: ActionOutcome
    detail: str
    at: datetime | None = None


class Stall(Record):
    """A running attempt that has been silent since `since`. `call` is the oldest of its calls in flight."""

    group_id: str
    rollout_id: str
    attempt: int
    worker: str
    call: int | None
    since: datetime


class BegunAttempt(Record):
    """A new current attempt. `recorded`: the responses of its sample that may be replayed. `fresh_reason`: why it began
    a new sample; None when it replays, or is the first attempt."""

    attempt: int
    sample: int
    recorded: int
    fresh_reason: str | None


class CallPosition(Record):
    """Where a model call is, within its rollout."""

    attempt: int = Field(ge=0)
    ordinal: int = Field(ge=0)


class WeightSpan(Record):
    """Sampled tokens start..end (end excluded) were generated under `version`."""

    version: str = Field(min_length=1)
    start: int = Field(ge=0)
    end: int = Field(gt=0)


class GeneratedResponse(Record):
    """What the model server hands over to be recorded. `body` is the response without its token arrays, byte for byte;
    `parent` the generated call whose conversation this one continues."""

    parent: CallPosition | None
    continuity: Continuity
    continuity_reason: str | None
    prompt_token_ids: tuple[int, ...] = Field(min_length=1)
    sampled_token_ids: tuple[int, ...] = Field(min_length=1)
    log_probs: tuple[FiniteFloat, ...]
    finish_reason: str | None
    response_id: str
    body: bytes
    weight_versions: tuple[WeightSpan, ...]
    conversation: str | None
    started_at: datetime

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        sampled = len(self.sampled_token_ids)
        if len(self.log_probs) != sampled:
            raise ValueError(f"{len(self.log_probs)} log-probabilities for {sampled} sampled tokens")
        reached = 0
        for span in self.weight_versions:
            if span.start != reached or span.end <= span.start:
                raise ValueError(f"weight span {span.start}..{span.end} does not follow token {reached}")
            reached = span.end
        if reached != sampled:
            raise ValueError(f"the weight spans cover {reached} of {sampled} sampled tokens")
        if (self.continuity == "root" and self.parent) or (self.continuity == "append" and not self.parent):
            raise ValueError(f"a call with continuity {self.continuity} and parent {self.parent}")
        if self.continuity == "new_segment" and not self.continuity_reason:
            raise ValueError("a new segment without a reason")
        return self


class RecordedResponse(GeneratedResponse):
    """A recorded response, read back. `position` is where it was generated, not where it was replayed."""

    position: CallPosition
    sample: int
    fingerprint: str
    occurrence: int
    digest: str
    chain_digest: str
    cumulative_digest: str
    ended_at: datetime


class CallLease(Record):
    """An attempt's hold on the k-th occurrence of a request. With `recorded`, the call is answered already."""

    rollout_id: str
    attempt: int
    ordinal: int
    sample: int
    fingerprint: str
    occurrence: int
    recorded: RecordedResponse | None


class LeaseRecord(Record):
    """A lease as it is stored. Neither released nor among the attempt's calls: in flight, or abandoned."""

    rollout_id: str
    attempt: int
    ordinal: int
    sample: int
    fingerprint: str
    occurrence: int
    claimed_at: datetime
    released_at: datetime | None


class ParentCall(Record):
    """A generated call that a later one may continue. `token_ids`: its prompt, then its sampled tokens."""

    position: CallPosition
    token_ids: tuple[int, ...]


class AttemptCall(Record):
    """One event of an attempt. What a replayed call answered with is that of the generated call at `position`.
    `body` and token ids are there for generated and replayed calls only."""

    ordinal: int
    outcome: CallOutcome
    fingerprint: str | None
    occurrence: int | None
    position: CallPosition | None
    replayed_from: int | None
    parent: CallPosition | None
    continuity: Continuity | None
    continuity_reason: str | None
    prompt_tokens: int
    generated_tokens: int
    prompt_token_ids: tuple[int, ...]
    sampled_token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str | None
    response_id: str | None
    weight_versions: tuple[WeightSpan, ...]
    body: bytes | None
    failure_class: str | None
    cause: str | None
    started_at: datetime
    ended_at: datetime
    digest: str | None
    chain_digest: str | None
    cumulative_digest: str | None


class SelectedResponse(Record):
    """A call of the settling attempt that the rollout went through. `boundary`: why its segment starts; None inside a
    segment and at the rollout's first call."""

    ordinal: int = Field(ge=0)
    segment: int = Field(ge=0)
    boundary: str | None


class ReportedCall(Record):
    """A model call that only the agent's own answer tells of; its ordinal is its place."""

    prompt_tokens: int = Field(ge=0)
    generated_tokens: int = Field(ge=0)
    finish_reason: str | None
    response_id: str | None


class Settlement(Record):
    """The outcome that an attempt reports. To be settled, a valid rollout needs a reward and
    `evidence_digest`, the blob it trains on; a masked one needs a reason."""

    rollout_id: str
    attempt: int
    state: Literal["valid", "masked"]
    reward: FiniteFloat | None = None
    truncated: bool = False
    reason: str | None = None
    policy_version_min: int | None = None
    policy_version_max: int | None = None
    evidence_digest: str | None = None
    segments: int = Field(default=0, ge=0)
    selected: tuple[SelectedResponse, ...] = ()
    reported: tuple[ReportedCall, ...] = ()


class SettledRollout(Record):
    """A rollout that is no longer open. `attempt` is the one that settled it, else the last one, if any began.
    `model_calls` are the selected ones; generated and replayed calls are those of all its attempts."""

    rollout_id: str
    group_id: str
    index: int
    state: Literal["valid", "masked", "lost"]
    attempt: int | None
    reward: float | None
    truncated: bool
    reason: str | None
    policy_version_min: int | None
    policy_version_max: int | None
    evidence_digest: str | None
    segments: int
    model_calls: int
    attempts: int
    generated_calls: int
    replayed_calls: int


class BatchRecord(Record):
    """The stored batch of a step; its bytes are the blob `digest`."""

    run_id: str
    step: int
    digest: str
    rows: int
    rollouts: int
    trained_tokens: int
    segments_max: int
    mean_reward: float | None
    group_ids: tuple[str, ...]


class StepRecord(Record):
    """An applied optimizer step: policy version `step` became `step` + 1."""

    run_id: str
    step: int
    batch_digest: str
    replayed_steps: int
    metrics: dict[str, float]
    applied_at: datetime


class EvaluationRecord(Record):
    """Mean reward of one policy version on the validation rows."""

    run_id: str
    version: int
    mean_reward: float | None
    rollouts: int
    recorded_at: datetime
