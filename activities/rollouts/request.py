"""The body of an agent's `/run` request: the dataset row, the run's sampling, and the identity of the attempt."""

from typing import Any

from configs.rollouts import RolloutsConfig
from storage.capture_ids import capture_id
from workflows.messages import RunRollout


def run_body(row: dict[str, Any], rollout: RunRollout, attempt: int, sampling: RolloutsConfig) -> dict[str, Any]:
    """Build the request of one attempt."""
    gym_id = capture_id(rollout.rollout_id)  # NeMo-Gym appends the attempt itself
    return {
        **sampled_row(row, sampling),
        "_ng_rollout_id": gym_id,
        "_ng_attempt_index": attempt,
        "_ng_task_index": rollout.row_index,
        "_ng_rollout_index": rollout.index,
        "context_compaction_rollout_id": gym_id,
        "context_compaction_group_id": rollout.group_id.replace("/", "."),
        "context_compaction_task_id": str(rollout.row_index),
        "context_compaction_rollout_index": rollout.index,
        "context_compaction_attempt_index": attempt,
    }


def sampled_row(row: dict[str, Any], sampling: RolloutsConfig) -> dict[str, Any]:
    """The row with the run's sampling parameters.

    The row's own `max_output_tokens` may lower the run's limit. Settings that make vLLM mask tokens with a grammar
    (`parallel_tool_calls: false`, `strict: true`, a forced `tool_choice`) are taken out: they would falsify the
    log-probabilities.
    """
    params = dict(row["responses_create_params"])
    if params.get("parallel_tool_calls") is False:
        del params["parallel_tool_calls"]
    if params.get("tool_choice") not in ("auto", "none"):
        params.pop("tool_choice", None)
    if params.get("tools"):
        params["tools"] = [{**tool, "strict": False} if tool.get("strict") else tool for tool in params["tools"]]
    limit = sampling.max_output_tokens
    params |= {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_output_tokens": min(limit, params.get("max_output_tokens") or limit),
    }
    return {**row, "responses_create_params": params}
