"""An environment server's `/run`: one episode, which it runs itself, with the agent as one part of it.

The request names the episode and its task, the answer names both again, so that nobody is scored for another's. An
answer of HTTP 200 has either a result, which is read as an agent's answer is, or a failure.
"""

from typing import Any

from activities.errors import IntegrityError
from activities.rollouts.request import sampled_row
from activities.rollouts.verdict import failure_of_episode
from configs.rollouts import RolloutsConfig
from storage.capture_ids import capture_id
from workflows.messages import RunRollout


def episode_body(row: dict[str, Any], rollout: RunRollout, attempt: int, sampling: RolloutsConfig) -> dict[str, Any]:
    """The request of one attempt. NeMo-Gym calls the model as `capture_id(rollout_id, attempt)`."""
    environment = row["agent_ref"]["name"]
    task_input = sampled_row(row, sampling)
    return {
        "episode_id": {"rollout_id": capture_id(rollout.rollout_id), "attempt": attempt},
        "task": {
            "task_id": {
                "taskset": f"{environment}:{rollout.purpose}",
                "task_id": str(row.get("prompt_id") or rollout.row_index),
            },
            # NeMo-Gym's own keys are an earlier collection's; this episode is named above.
            "task_input": {key: value for key, value in task_input.items() if not key.startswith("_ng_")},
        },
    }


def result_of(answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """The result in the answer to `body`.

    Raises:
        EnvironmentFailed, EnvironmentRefused: it is a failure.
        IntegrityError: it is another episode's, or has not exactly one of result and failure.
    """
    asked = {"episode_id": body["episode_id"], "task_id": body["task"]["task_id"]}
    for key, value in asked.items():
        if answer.get(key) != value:
            raise IntegrityError(f"the answer is of {key} {answer.get(key)!r}, asked was {value!r}")
    result, failure = answer.get("result"), answer.get("failure")
    if isinstance(failure, dict) and result is None:
        raise failure_of_episode(failure)
    if not isinstance(result, dict) or failure is not None:
        raise IntegrityError("the answer of an environment server has not exactly one of result and failure")
    return result
