"""Short ways to write model calls, answers and requests of a rollout."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from activities.rollouts.declarations import Declaration
from activities.rollouts.evidence import CallEvidence
from storage.capture_ids import capture_id
from storage.records import AttemptCall, CallOutcome, CallPosition, Continuity, WeightSpan
from workflows.messages import RunRollout

FIXTURES = Path(__file__).parent / "fixtures"
NOW = datetime(2030, 1, 1, tzinfo=UTC)

Tokens = Sequence[int]


def real_answer(name: str, gym_id: str | None = None) -> dict[str, Any]:
    """An answer that NeMo-Gym 0.7.0 gave to `/run` (agents simple_agent and simple_agent_with_compaction), as one to
    the rollout of `request()` or of another id."""
    answer = json.loads((FIXTURES / f"{name}.json").read_text())
    for entry in answer["response"].get("model_call_metadata", []):
        entry["rollout_id"] = gym_id or capture_id(request().rollout_id)
    return answer


def call(
    prompt: Tokens,
    sampled: Tokens,
    declared: Declaration | None = None,
    *,
    first_log_prob: float = -1.0,
    new_segment: str | None = None,
    ordinal: int = 0,
) -> CallEvidence:
    """A model call whose log-probabilities count down from `first_log_prob`."""
    return CallEvidence(
        ordinal=ordinal,
        prompt_tokens=list(prompt),
        sampled_tokens=list(sampled),
        log_probs=[first_log_prob - place for place in range(len(sampled))],
        finish_reason=None,
        response_id=None,
        declared=declared,
        new_segment=new_segment,
    )


def declared(segment: int, boundary: str | None = None) -> Declaration:
    """What the compaction agent says of a call; `boundary` at the first call of a later segment."""
    return Declaration(segment, boundary, None, None)


def recorded(
    ordinal: int,
    prompt: Tokens = (1,),
    sampled: Tokens = (2,),
    *,
    parent: int | None = None,
    continuity: Continuity | None = None,
    response_id: str | None = None,
    finish_reason: str = "stop",
    versions: Sequence[tuple[int, int]] = (),
    replayed_from: int | None = None,
    attempt: int = 0,
) -> AttemptCall:
    """A generated or replayed call of attempt `attempt`. `versions`: (policy version, tokens) of each span."""
    spans: list[WeightSpan] = []
    for version, tokens in versions or [(3, len(sampled))]:
        start = spans[-1].end if spans else 0
        spans.append(WeightSpan(version=f"policy-{version}", start=start, end=start + tokens))
    born = attempt if replayed_from is None else replayed_from
    continuity = continuity or ("root" if parent is None else "append")
    return _event(
        ordinal,
        "generated" if replayed_from is None else "replayed",
        fingerprint=f"request-{ordinal}",
        occurrence=0,
        position=CallPosition(attempt=born, ordinal=ordinal),
        replayed_from=replayed_from,
        parent=None if parent is None else CallPosition(attempt=born, ordinal=parent),
        continuity=continuity,
        continuity_reason="no earlier call is known" if continuity == "new_segment" else None,
        prompt_tokens=len(prompt),
        generated_tokens=len(sampled),
        prompt_token_ids=tuple(prompt),
        sampled_token_ids=tuple(sampled),
        log_probs=tuple(-0.25 * (ordinal + 1) - 0.125 * place for place in range(len(sampled))),
        finish_reason=finish_reason,
        response_id=response_id or f"chatcmpl-{ordinal}",
        weight_versions=tuple(spans),
        body=b"{}",
    )


def failed(ordinal: int, failure_class: str, cause: str = "HTTP 400") -> AttemptCall:
    """A call without a response."""
    return _event(ordinal, "failed", fingerprint="f", occurrence=0, failure_class=failure_class, cause=cause)


def measured(ordinal: int, prompt_tokens: int = 801) -> AttemptCall:
    """A prompt that the agent measured."""
    return _event(ordinal, "measured", prompt_tokens=prompt_tokens)


def _event(ordinal: int, outcome: CallOutcome, **fields: Any) -> AttemptCall:
    nothing = dict.fromkeys(AttemptCall.model_fields)
    empty = dict.fromkeys(("prompt_token_ids", "sampled_token_ids", "log_probs", "weight_versions"), ())
    always = {"ordinal": ordinal, "outcome": outcome, "prompt_tokens": 0, "generated_tokens": 0}
    return AttemptCall.model_validate(nothing | empty | always | {"started_at": NOW, "ended_at": NOW} | fields)


def item(prompt: list[int], sampled: list[int], kind: str = "function_call") -> dict[str, Any]:
    """An output item that carries the tokens of a model call."""
    return {
        "type": kind,
        "id": f"item-{len(prompt)}",
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }


def answer(*items: dict[str, Any], reward: Any = 1.0, status: str = "completed", **fields: Any) -> dict[str, Any]:
    """A `/run` answer with these output items."""
    return {"reward": reward, "response": {"status": status, "output": list(items)}, **fields}


def request(run_id: str = "climb", step: int = 3, slot: int = 1, index: int = 2, row_index: int = 0) -> RunRollout:
    """Rollout `index` of a training group, sampled from the step's own policy version."""
    group_id = f"{run_id}/step-{step}/group-{slot}"
    return RunRollout(
        run_id=run_id,
        group_id=group_id,
        rollout_id=f"{group_id}/rollout-{index}",
        step=step,
        slot=slot,
        index=index,
        row_index=row_index,
        purpose="train",
        policy_version=step,
    )
