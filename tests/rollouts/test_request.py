"""The body of a `/run` request: the row, the run's sampling, the attempt's identity."""

import copy
import json
from typing import Any

import pytest

from activities.rollouts.request import run_body
from configs.rollouts import RolloutsConfig
from tests.rollouts.building import request

SAMPLING = RolloutsConfig(temperature=0.7, top_p=0.9, max_output_tokens=100)


def body(attempt: int = 0, **params: Any) -> dict[str, Any]:
    row = {"responses_create_params": {"input": "climb", **params}, "agent_ref": {"name": "safe_agent"}, "seed": 9}
    return run_body(row, request(row_index=17), attempt, SAMPLING)


def test_identity_of_the_attempt_is_exact() -> None:
    identity = {key: value for key, value in body(attempt=5).items() if key.startswith(("_ng", "context"))}
    assert identity == {
        "_ng_rollout_id": "climb.step-3.group-1.rollout-2",
        "_ng_attempt_index": 5,
        "_ng_task_index": 17,
        "_ng_rollout_index": 2,
        "context_compaction_rollout_id": "climb.step-3.group-1.rollout-2",
        "context_compaction_group_id": "climb.step-3.group-1",
        "context_compaction_task_id": "17",
        "context_compaction_rollout_index": 2,
        "context_compaction_attempt_index": 5,
    }


def test_row_goes_along_and_sampling_is_the_runs() -> None:
    made = body(temperature=0.0, top_p=0.1)
    assert (made["agent_ref"], made["seed"]) == ({"name": "safe_agent"}, 9)
    assert made["responses_create_params"] == {
        "input": "climb",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_output_tokens": 100,
    }


@pytest.mark.parametrize(("asked", "sent"), [(None, 100), (0, 100), (30, 30), (100, 100), (500, 100)])
def test_row_may_lower_the_token_limit_but_not_raise_it(asked: int | None, sent: int) -> None:
    assert body(max_output_tokens=asked)["responses_create_params"]["max_output_tokens"] == sent


GRAMMARS = {
    "parallel_tool_calls": {"parallel_tool_calls": False},
    "strict tool": {"tools": [{"name": "a", "strict": True}]},
    "required tool": {"tool_choice": "required"},
    "named tool": {"tool_choice": {"type": "function", "name": "a"}},
}


@pytest.mark.parametrize("params", GRAMMARS.values(), ids=list(GRAMMARS))
def test_settings_that_make_vllm_mask_tokens_never_leave(params: dict[str, Any]) -> None:
    sent = body(**params)["responses_create_params"]
    assert "parallel_tool_calls" not in sent
    assert "tool_choice" not in sent
    assert '"strict": true' not in json.dumps(sent)


def test_settings_that_mask_nothing_stay() -> None:
    tools = [{"name": "a", "strict": False}, {"name": "b"}]
    sent = body(parallel_tool_calls=True, tool_choice="none", tools=tools)["responses_create_params"]
    assert (sent["parallel_tool_calls"], sent["tool_choice"], sent["tools"]) == (True, "none", tools)


def test_strict_tool_keeps_the_key_that_gym_requires() -> None:
    sent = body(tools=[{"name": "a", "strict": True, "parameters": {}}])["responses_create_params"]
    assert sent["tools"] == [{"name": "a", "strict": False, "parameters": {}}]


def test_row_is_not_changed() -> None:
    row = {
        "responses_create_params": {
            "input": "climb",
            "parallel_tool_calls": False,
            "tool_choice": "required",
            "tools": [{"name": "a", "strict": True}],
        },
        "_ng_attempt_index": 99,
    }
    before = copy.deepcopy(row)
    made = run_body(row, request(), 1, SAMPLING)
    assert row == before
    assert made["_ng_attempt_index"] == 1
