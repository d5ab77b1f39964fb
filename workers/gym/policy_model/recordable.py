"""From a completion to the response that is recorded: whole, finite, and of a published version of the policy."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from storage.call_payloads import POLICY_VERSION
from storage.records import GeneratedResponse, WeightSpan
from workers.gym.policy_model.continuity import Continuation
from workers.gym.policy_model.conversation import own_key
from workers.gym.policy_model.errors import ContinuityBroken, UnknownWeightVersion
from workers.gym.policy_model.exact import Completion
from workers.gym.policy_model.recorded import body_without_tokens


def recordable(
    body: dict[str, Any], going_on: Continuation, completion: Completion, started_at: datetime
) -> GeneratedResponse:
    """What the ledger gets of a completion of the request `body`.

    Raises:
        UnknownWeightVersion: tokens of weights that are no version of the policy.
        ContinuityBroken: tokens, log-probabilities and spans do not belong together.
    """
    message = completion.response["choices"][0]["message"]
    try:
        return GeneratedResponse(
            parent=going_on.parent,
            continuity=going_on.continuity,
            continuity_reason=going_on.reason,
            prompt_token_ids=tuple(completion.prompt_token_ids),
            sampled_token_ids=tuple(completion.sampled_token_ids),
            log_probs=tuple(completion.log_probs),
            finish_reason=completion.finish_reason,
            response_id=completion.response_id,
            body=body_without_tokens(completion.response),
            weight_versions=_policy_versions(completion),
            conversation=own_key(body, message),
            started_at=started_at,
        )
    except ValidationError as error:
        problems = "; ".join(_told(problem) for problem in error.errors()[:3])
        raise ContinuityBroken(f"vLLM's answer contradicts itself: {problems}") from error


def _told(problem: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _policy_versions(completion: Completion) -> tuple[WeightSpan, ...]:
    for span in completion.weight_versions:
        if POLICY_VERSION.fullmatch(span.version) is None:
            raise UnknownWeightVersion(
                f"vLLM names the weights of tokens {span.start} to {span.end} {span.version!r}, which is no version of "
                "the policy (policy-<number>). A refit that publishes one stamps every endpoint."
            )
    return tuple(
        WeightSpan(version=span.version, start=span.start, end=span.end) for span in completion.weight_versions
    )
