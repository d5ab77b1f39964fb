"""Evidence from the agent's own answer, for agents whose model calls nobody records.

The answer's calls must have been sampled by the step's policy version: only the caller can check that.
"""

from activities.errors import IntegrityError
from activities.rollouts.answer import Answer
from activities.rollouts.content import Content
from activities.rollouts.evidence import Evidence
from activities.rollouts.truncation import kept
from storage.records import ReportedCall


def content_failure(answer: Answer) -> Content | None:
    """What of the rollout's own content ended it, as far as the answer shows it."""
    return "context_overflow" if answer.ended_empty and answer.masked is None else None


def evidence(answer: Answer, policy_version: int, *, truncate: bool) -> Evidence:
    """All calls of the answer, or with `truncate` those before the first undeclared rewrite.

    Raises:
        IntegrityError: an answer without tokens that nobody masked.
    """
    reason = answer.masked or content_failure(answer)
    if not answer.calls and reason is None:
        raise IntegrityError("NeMo-Gym returned a result with no generation data")
    return Evidence(
        calls=kept(answer.calls) if truncate else answer.calls,
        reported=tuple(
            ReportedCall(
                prompt_tokens=len(call.prompt_tokens),
                generated_tokens=len(call.sampled_tokens),
                finish_reason=call.finish_reason,
                response_id=call.response_id,
            )
            for call in answer.calls
        ),
        reward=answer.reward,
        truncated=answer.truncated,
        reason=reason,
        policy_versions=(policy_version, policy_version),
    )
