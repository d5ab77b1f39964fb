"""Evidence from the ledger: the recorded responses that the answer selects, with their exact tokens and versions.

The answer says which responses the rollout went through and what the environment thinks of them; what they hold comes
from the ledger alone.
"""

import math
from collections.abc import Sequence

from activities.errors import IntegrityError
from activities.rollouts.answer import Answer
from activities.rollouts.content import Content
from activities.rollouts.declarations import Declaration
from activities.rollouts.evidence import CallEvidence, Evidence
from activities.rollouts.selection import select
from storage.records import AttemptCall

_VERSION = "policy-"


def evidence(answer: Answer, calls: Sequence[AttemptCall], content: Content | None, policy_version: int) -> Evidence:
    """What an answered attempt ended with. `policy_version` stands in where no response is selected.

    Raises:
        IntegrityError: nothing is recorded, or what is recorded is not what the answer says.
    """
    responses = [call for call in calls if call.outcome in ("generated", "replayed")]
    reason = answer.masked or content
    if not calls and (answer.calls or reason is None):
        raise IntegrityError(
            "the agent answered, but none of its model calls is recorded: its model server does not record. Give that "
            "the implementation workers.gym.policy_model.app (workers.gym.policy_model.compaction for the compaction "
            "agent), or set rollouts.evidence: response"
        )
    if not responses and reason is None:
        raise IntegrityError("NeMo-Gym returned a result with no generation data")
    selection = select(answer, responses)
    declared = [call.declared for call in answer.calls] or [None] * len(selection.calls)
    chosen = tuple(_evidence(call, said) for call, said in zip(selection.calls, declared, strict=True))
    return Evidence(
        calls=chosen,
        reported=(),
        reward=answer.reward,
        truncated=answer.truncated or (bool(chosen) and chosen[-1].finish_reason == "length"),
        reason=reason or selection.unselected,
        policy_versions=_versions(selection.calls, policy_version),
    )


def unanswered(content: Content, policy_version: int) -> Evidence:
    """What an attempt ended with whose content ended it before it could answer."""
    return Evidence((), (), None, False, content, (policy_version, policy_version))


def _evidence(call: AttemptCall, declared: Declaration | None) -> CallEvidence:
    if not all(map(math.isfinite, call.log_probs)):
        raise IntegrityError(f"call {call.ordinal}: a recorded log-probability is not a finite number")
    new_segment = None
    if call.continuity == "new_segment":
        new_segment = call.continuity_reason or "continues no earlier call"
    return CallEvidence(
        ordinal=call.ordinal,
        prompt_tokens=list(call.prompt_token_ids),
        sampled_tokens=list(call.sampled_token_ids),
        log_probs=list(call.log_probs),
        finish_reason=call.finish_reason,
        response_id=call.response_id,
        declared=declared,
        new_segment=new_segment,
    )


def _versions(calls: Sequence[AttemptCall], policy_version: int) -> tuple[int, int]:
    versions = [int(span.version.removeprefix(_VERSION)) for call in calls for span in call.weight_versions]
    return min(versions, default=policy_version), max(versions, default=policy_version)
