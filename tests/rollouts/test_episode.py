"""The episode of an environment server: what is asked, and that the answer is to it."""

from typing import Any

import pytest

from activities.errors import EnvironmentFailed, EnvironmentRefused, IntegrityError
from activities.rollouts.episode import episode_body, result_of
from configs.rollouts import RolloutsConfig
from storage.capture_ids import capture_id
from tests.rollouts.building import request

SAMPLING = RolloutsConfig(temperature=0.7, top_p=0.9, max_output_tokens=100)
ROW = {"responses_create_params": {"input": "climb"}, "agent_ref": {"name": "wall"}, "seed": 9}


def body(attempt: int = 0, **row: Any) -> dict[str, Any]:
    return episode_body({**ROW, **row}, request(row_index=17), attempt, SAMPLING)


def reply(asked: dict[str, Any], **fields: Any) -> dict[str, Any]:
    echo = {"episode_id": asked["episode_id"], "task_id": asked["task"]["task_id"]}
    return {**echo, "result": None, "failure": None, **fields}


@pytest.mark.parametrize("attempt", [0, 1, 12])
def test_the_episode_is_the_attempt_under_whose_id_its_model_calls_are_recorded(attempt: int) -> None:
    episode = body(attempt)["episode_id"]
    assert episode == {"rollout_id": "climb.step-3.group-1.rollout-2", "attempt": attempt}
    key = episode["rollout_id"] if attempt == 0 else f"{episode['rollout_id']}-a{attempt}"  # NeMo-Gym's rule
    assert key == capture_id(request().rollout_id, attempt)


def test_the_task_is_the_prompt_of_the_row() -> None:
    assert body(prompt_id="safe-7")["task"]["task_id"] == {"taskset": "wall:train", "task_id": "safe-7"}
    assert body()["task"]["task_id"] == {"taskset": "wall:train", "task_id": "17"}


def test_the_row_goes_along_with_the_run_s_sampling_and_without_an_earlier_collection_s_ids() -> None:
    task_input = body(_ng_rollout_id="old", _ng_attempt_index=4)["task"]["task_input"]
    params = {"input": "climb", "temperature": 0.7, "top_p": 0.9, "max_output_tokens": 100}
    assert task_input == {"responses_create_params": params, "agent_ref": {"name": "wall"}, "seed": 9}


def test_a_result_comes_back() -> None:
    asked = body()
    assert result_of(reply(asked, result={"reward": 1.0}), asked) == {"reward": 1.0}


@pytest.mark.parametrize(("terminal", "error"), [(False, EnvironmentFailed), (True, EnvironmentRefused)])
def test_a_failure_is_an_error_although_the_answer_is_200(terminal: bool, error: type[Exception]) -> None:
    asked = body()
    failure = {"failure_reason": "Episode timed out", "terminal": terminal}
    with pytest.raises(error, match="Episode timed out"):
        result_of(reply(asked, failure=failure), asked)


@pytest.mark.parametrize(
    "change",
    [
        {"episode_id": {"rollout_id": "climb.step-3.group-1.rollout-1", "attempt": 0}},
        {"episode_id": {"rollout_id": "climb.step-3.group-1.rollout-2", "attempt": 1}},
        {"episode_id": None},
        {"task_id": {"taskset": "wall:train", "task_id": "18"}},
        {"task_id": "17"},
    ],
    ids=str,
)
@pytest.mark.parametrize("said", [{"result": {"reward": 1.0}}, {"failure": {"terminal": False}}], ids=str)
def test_an_answer_to_another_episode_is_never_taken(change: dict[str, Any], said: dict[str, Any]) -> None:
    asked = body()
    with pytest.raises(IntegrityError, match="the answer is of"):
        result_of(reply(asked, **said) | change, asked)


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"result": {"reward": 1.0}, "failure": {"terminal": False}},
        {"result": [1.0]},
        {"failure": "late"},
        {"failure": ["late"], "result": {"reward": 1.0}},
    ],
    ids=str,
)
def test_an_answer_is_a_result_or_a_failure(said: dict[str, Any]) -> None:
    asked = body()
    with pytest.raises(IntegrityError, match="exactly one of result and failure"):
        result_of(reply(asked, **said), asked)
