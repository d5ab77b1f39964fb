"""What crosses Temporal: inputs and results of workflows and activities.

Only ids, counts, digests and policy numbers; tokens and prompts stay in the ledger and the blob store.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from configs.failure import FailureConfig
from configs.generation import GenerationConfig
from configs.grpo import GrpoConfig
from configs.rollouts import RolloutsConfig
from configs.training import TrainingConfig

Bucket = Literal["infra", "data"]
Boundary = Literal["agent", "environment", "model", "ledger", "trainer", "generation"]
RolloutState = Literal["open", "valid", "masked", "lost"]
GroupState = Literal["open", "sealed", "parked", "dropped", "set_aside", "trained"]
Purpose = Literal["train", "validation", "diagnostic"]


class Message(BaseModel):
    """Base of all messages: unknown fields are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunPolicy(Message):
    """The sections of a recipe that workflows decide by."""

    grpo: GrpoConfig
    rollouts: RolloutsConfig
    failure: FailureConfig
    generation: GenerationConfig
    training: TrainingConfig


class BudgetState(Message):
    """Drop counters of the run, counted by the ledger in the order in which groups ended."""

    consecutive_drops: int = 0
    skipped_prompts: int = 0


class Failure(Message):
    """Why an attempt ended without a result. The detail of every activity error.

    `retries` counts the infrastructure failures of the same activity before this one. A `final` failure ends the
    rollout at once, whatever its budgets: it may not be tried again.
    """

    run_id: str
    group_id: str | None = None
    rollout_id: str | None = None
    attempt: int | None = None
    boundary: Boundary
    bucket: Bucket
    failure_class: str
    cause: str
    retries: int = 0
    final: bool = False


class ClaimPrompts(Message):
    """Ask for the prompts of slots [first_slot, first_slot + count) of a step."""

    run_id: str
    step: int
    purpose: Purpose
    first_slot: int
    count: int


class PromptClaim(Message):
    """One prompt of the dataset, reserved for one slot of one step."""

    slot: int
    prompt_id: str
    row_index: int


class PromptClaims(Message):
    """Claims in order of slots; fewer than asked only for a validation set that is smaller."""

    claims: tuple[PromptClaim, ...]


class PlanStep(Message):
    """Ask which groups stand for the `count` slots of a step; prompts that are not claimed yet are claimed."""

    run_id: str
    step: int
    count: int


class SlotPlan(Message):
    """The group that stands for a slot now: the prompt claimed for it, or what took its place.

    `replaces` is the group whose place it took, `replacements_used` counts those before it in this place. `lent` is a
    group of a later step that was promoted into this one: it has ended and is trained here. `given_away` says that the
    group of this claim is trained by an earlier step, `set_aside` that its rewards are all equal; nothing has its place
    yet: a spare prompt takes it.
    """

    claim: PromptClaim
    replaces: str | None = None
    replacements_used: int = 0
    lent: "GroupResult | None" = None
    given_away: bool = False
    set_aside: bool = False


class SetAside(Message):
    """A group that a step set aside, and the reward that all its valid rollouts have."""

    group_id: str
    reward: float


class StepPlan(Message):
    """The slots of a step in order, and the first slot that no prompt is claimed for. `spares` are the prompts that are
    claimed beyond those slots and that no group was opened for yet, in order; `set_aside` are the groups that carried
    no signal, those whose place is taken included."""

    slots: tuple[SlotPlan, ...]
    next_slot: int
    spares: tuple[PromptClaim, ...] = ()
    set_aside: tuple[SetAside, ...] = ()


class OpenGroup(Message):
    """Write a group and its rollouts. `replaces`: the group whose place in the step it takes."""

    run_id: str
    group_id: str
    step: int
    slot: int
    purpose: Purpose
    prompt_id: str
    row_index: int
    num_rollouts: int
    replaces: str | None = None


class OpenedGroup(Message):
    """A group as the ledger has it: new, or with what an earlier execution settled. `last_attempts` has the newest
    attempt of each rollout by index, None where none began; it is empty for a group that is new."""

    state: Literal["open", "sealed", "set_aside", "trained"]
    settled: tuple["RolloutResult", ...]
    last_attempts: tuple[int | None, ...] = ()


class RunRollout(Message):
    """One try-until-settled of one rollout.

    `policy_version` is the one that the group began with, `newest_policy_version` the newest that may sample for it
    (None: no other). Responses of attempts up to `fresh_after` are not replayed.
    """

    run_id: str
    group_id: str
    rollout_id: str
    step: int
    slot: int
    index: int
    row_index: int
    purpose: Purpose
    policy_version: int
    newest_policy_version: int | None = None
    fresh_after: int | None = None


class RolloutResult(Message):
    """A settled rollout, as stored in the ledger. `model_calls` are those it went through; `generated_calls` and
    `replayed_calls` are those of all its attempts. `policy_version` is the oldest that sampled for it."""

    rollout_id: str
    index: int
    state: Literal["valid", "masked", "lost"]
    attempt: int | None
    reward: float | None = None
    model_calls: int = 0
    segments: int = 0
    policy_version: int | None = None
    reason: str | None = None
    attempts: int = 0
    generated_calls: int = 0
    replayed_calls: int = 0


class LoseRollout(Message):
    """Give a rollout up: lost, because its retry budgets are used up, or masked by an operator."""

    run_id: str
    group_id: str
    rollout_id: str
    index: int
    state: Literal["lost", "masked"] = "lost"
    reason: str


class SealGroup(Message):
    """Write a group's state. `reason` names why it was parked, dropped or set aside."""

    run_id: str
    group_id: str
    state: Literal["sealed", "parked", "dropped", "set_aside"]
    bucket: Bucket | None = None
    reason: str | None = None


class SealedGroup(Message):
    """The run's drop counters right after a group ended, or as they are when it is parked."""

    budgets: BudgetState


class GroupResult(Message):
    """How a group ended. `policy_version` is the oldest of its valid rollouts', else the one it was started with;
    `bucket` is None for a group that was dropped by an operator or by cancellation, which no budget counts;
    `failure_classes` are those of all failures that its rollouts had."""

    group_id: str
    slot: int
    prompt_id: str
    state: Literal["sealed", "dropped", "set_aside"]
    valid: int
    masked: int
    lost: int
    mean_reward: float | None = None
    bucket: Bucket | None = None
    reason: str | None = None
    policy_version: int | None = None
    failure_classes: tuple[str, ...] = ()
    budgets: BudgetState = BudgetState()


class GroupParked(Message):
    """A group tells its step that it waits for an operator and why; or, without a reason, that it goes on."""

    group_id: str
    reason: str | None = None
    failure_classes: tuple[str, ...] = ()


class PromoteGroup(Message):
    """Train a sealed group in an earlier step, in the place of `replaces`, which that step lost."""

    run_id: str
    group_id: str
    to_step: int
    replaces: str


class Promoted(Message):
    """Whether the ledger let the group go; `refusal` says why not."""

    refusal: str | None = None


class LendGroup(Message):
    """A step asks a later one for a group that has ended well, in the place of `lost`; `replacements_used` of that
    place move to the lender with its loss."""

    borrower: int
    lost: str
    replacements_used: int


class Lent(Message):
    """The answer: a group, or None."""

    lender: int
    lost: str
    group: GroupResult | None = None


class AssembleBatch(Message):
    """Build and store the batch of a step from its sealed groups."""

    run_id: str
    step: int
    group_ids: tuple[str, ...]


class FindBatch(Message):
    """Ask for the batch of a step, should an earlier execution have stored it."""

    run_id: str
    step: int


class BatchRef(Message):
    """A stored batch. `rollouts` are all of its groups', `rows` those that train; `trained_tokens` are the tokens with
    loss mask 1; the reward is the mean over valid rollouts."""

    step: int
    digest: str
    groups: int
    rows: int
    rollouts: int
    trained_tokens: int
    mean_reward: float


class FoundBatch(Message):
    """The batch of a step, or None."""

    batch: BatchRef | None


class WeightsRef(Message):
    """Exported weights in Hugging Face format: folder on the shared file system, digest of its files."""

    version: int
    path: str
    digest: str


class RecordEvaluation(Message):
    """Write the result of an evaluation of one policy version."""

    run_id: str
    version: int
    group_ids: tuple[str, ...]


class SetRunState(Message):
    """Write the state of a run."""

    run_id: str
    state: Literal["running", "paused", "completed", "stopped", "failed"]
    reason: str | None = None


class RecordAction(Message):
    """Write an operator's request and what became of it to the audit. The same `action_id` again changes nothing."""

    action_id: str
    run_id: str
    target: str
    verb: str
    actor: str
    reason: str
    arguments: dict[str, JsonValue]
    outcome: Literal["done", "unchanged", "refused"]
    detail: str


class ReadBudgets(Message):
    """Ask for the drop counters of a run."""

    run_id: str


class ChangeRecipe(Message):
    """Write new values of recipe keys, by dotted key, so that a resumed run has them too."""

    run_id: str
    changes: dict[str, JsonValue]


class GroupInput(Message):
    """Everything a PromptGroup workflow decides by. Its workflow id is the group id. `weights` is the policy version
    that it begins with, `newest_policy_version` the newest that may sample for it (None: no other). `fresh`: nothing of
    what an earlier execution recorded for its open rollouts is replayed."""

    run_id: str
    step: int
    slot: int
    purpose: Purpose
    prompt_id: str
    row_index: int
    num_rollouts: int
    min_valid_rollouts: int
    weights: WeightsRef
    policy: RunPolicy
    task_queue: str
    newest_policy_version: int | None = None
    replaces: str | None = None
    fresh: bool = False


class StepInput(Message):
    """Everything a TrainingStep workflow decides by. `weights` is the policy version that its groups begin with; the
    step trains once the run gives it its turn."""

    run_id: str
    step: int
    weights: WeightsRef
    policy: RunPolicy
    task_queue: str


class StepResult(Message):
    """What a step leaves to the next one. A drained step has collected its groups and trained nothing; `weights` is
    None then. `budgets` are the run's drop counters as the step last saw them."""

    step: int
    state: Literal["applied", "drained"]
    weights: WeightsRef | None = None
    trained: int = 0
    dropped: int = 0
    set_aside: int = 0
    promoted: int = 0
    replaced: int = 0
    mean_reward: float = 0.0
    budgets: BudgetState = BudgetState()


class EvaluationInput(Message):
    """Evaluate one policy version on prompts that are never trained."""

    run_id: str
    weights: WeightsRef
    policy: RunPolicy
    task_queue: str


class EvaluationResult(Message):
    """Mean reward over the valid rollouts of an evaluation; None where none is valid."""

    version: int
    mean_reward: float | None
    rollouts: int


class RunInput(Message):
    """State of a TrainingRun; the whole of it crosses continue-as-new, which is due after `steps_per_execution`.
    `because` is who paused or stopped it and why."""

    run_id: str
    policy: RunPolicy
    task_queue: str
    next_step: int = 0
    stop_after_step: int | None = None
    weights: WeightsRef | None = None
    paused: bool = False
    because: str | None = None
    steps_per_execution: int = Field(default=50, ge=1)


class RunResult(Message):
    """How a run ended."""

    run_id: str
    state: Literal["completed", "stopped"]
    steps: int
    policy_version: int
