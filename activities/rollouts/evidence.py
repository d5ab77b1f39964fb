"""What an attempt ended with, wherever it is known from: the agent's own answer, or the ledger."""

from dataclasses import dataclass

from activities.rollouts.declarations import Declaration
from storage.records import ReportedCall


@dataclass(frozen=True)
class CallEvidence:
    """One model call that the rollout went through. `ordinal`: its place in the ledger, or in the answer.

    `declared` is what the compaction agent says of it, None where the agent declares nothing. `new_segment` is the
    model server's reason not to continue an earlier call, None where it did, or where nobody recorded it.
    """

    ordinal: int
    prompt_tokens: list[int]
    sampled_tokens: list[int]
    log_probs: list[float]
    finish_reason: str | None
    response_id: str | None
    declared: Declaration | None = None
    new_segment: str | None = None


@dataclass(frozen=True)
class Evidence:
    """`calls`: what the rollout went through, in order. `reported`: all calls of the answer, where only that tells of
    them. `reason`: why the rollout must not train. `policy_versions`: the oldest and the newest that sampled."""

    calls: tuple[CallEvidence, ...]
    reported: tuple[ReportedCall, ...]
    reward: float | None
    truncated: bool
    reason: str | None
    policy_versions: tuple[int, int]
