"""A `/run` answer, read once and checked: what it says is consistent, or it is an IntegrityError.

NeMo-Gym puts the tokens of a model call on its last output item: `prompt_token_ids` (the whole prompt of the call),
`generation_token_ids` and `generation_log_probs`. An agent behind another kind of model server may send none of them;
the ledger knows the calls then.
"""

from dataclasses import dataclass
from typing import Any

from activities.errors import IntegrityError, one_line
from activities.rollouts.declarations import Declaration, declarations
from activities.rollouts.evidence import CallEvidence
from activities.rollouts.verdict import is_finite, verdict

_TOKEN_IDS = range(2**31)
_SAMPLED_TYPES = ("reasoning", "message", "function_call")


@dataclass(frozen=True)
class Answer:
    """What one answer says. `masked`: why the environment wants the rollout masked; only then `reward` may be None.
    `remark`: a failure in spite of which the answer counts. `ended_empty`: its last reply has no tokens. `terminal_id`:
    the response that the agent declares to be its last."""

    calls: tuple[CallEvidence, ...]
    reward: float | None
    truncated: bool
    ended_empty: bool
    masked: str | None
    remark: str | None
    response_id: str | None
    terminal_id: str | None


def parse(answer: dict[str, Any], rollout_id: str) -> Answer:
    """Read a `/run` answer, or the result of an episode. `rollout_id`: as NeMo-Gym was given it.

    Raises:
        EnvironmentFailed, EnvironmentRefused: it tells of a failure.
        IntegrityError: a missing or non-finite reward, token fields that do not belong together or hold no token
            ids, log-probabilities that are not finite, declarations that contradict the calls.
    """
    worth = verdict(answer)
    response = answer.get("response")
    if not isinstance(response, dict) or not isinstance(response.get("output"), list):
        raise IntegrityError("the answer has no response.output list")
    items = [item for item in response["output"] if isinstance(item, dict)]
    with_tokens = [item for item in items if item.get("generation_token_ids")]
    _check_tokens(with_tokens)
    declared = declarations(response, [len(item["generation_token_ids"]) for item in with_tokens], rollout_id)
    truncated = response.get("status") == "incomplete"
    last = next((item for item in reversed(items) if item.get("type") in _SAMPLED_TYPES), None)
    return Answer(
        calls=tuple(_call(place, item, declared[place]) for place, item in enumerate(with_tokens)),
        reward=worth.reward,
        truncated=truncated,
        # vLLM refused the prompt as too long: NeMo-Gym ends the episode with an empty message. A reply that was cut
        # off has tokens, on its reasoning where that is all it has.
        ended_empty=truncated and (last is None or not last.get("generation_token_ids")),
        masked=worth.masked,
        remark=worth.remark,
        response_id=_text(response.get("id")),
        terminal_id=_text(answer.get("terminal_logical_request_id")),
    )


def _call(place: int, item: dict[str, Any], declared: Declaration | None) -> CallEvidence:
    return CallEvidence(
        ordinal=place,
        prompt_tokens=item["prompt_token_ids"],
        sampled_tokens=item["generation_token_ids"],
        log_probs=item["generation_log_probs"],
        finish_reason=declared.finish_reason if declared else None,
        response_id=(declared.request_id if declared else None) or _text(item.get("id")),
        declared=declared,
    )


def _check_tokens(items: list[dict[str, Any]]) -> None:
    for number, item in enumerate(items):
        prompt, sampled, log_probs = (
            item.get(key) for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        )
        if not (isinstance(prompt, list) and isinstance(sampled, list) and isinstance(log_probs, list) and prompt):
            raise IntegrityError(f"model call {number} lacks prompt_token_ids or generation_log_probs")
        if not all(type(token) is int and token in _TOKEN_IDS for tokens in (prompt, sampled) for token in tokens):
            raise IntegrityError(f"model call {number}: a token id is not an integer of 31 bits")
        if len(sampled) != len(log_probs):
            raise IntegrityError(
                f"model call {number} has {len(sampled)} tokens but {len(log_probs)} log-probabilities"
            )
        if not all(map(is_finite, log_probs)):
            raise IntegrityError(f"model call {number}: a log-probability is not a finite number")


def _text(value: Any) -> str | None:
    return one_line(str(value)) or None if value else None
