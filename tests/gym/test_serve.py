"""The real Gym servers, started by the launcher, play whole episodes with a scripted policy."""

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from configs.recipe import Recipe
from tests.gym.launcher import Launcher
from tests.gym.policies import splitting
from tests.gym.stub_model import Message, Policy, Reply, StubModel
from workers.demo.dataset import row
from workers.environments.paths import repository_root
from workers.gym.safe.game import TURNS
from workers.gym.serve import bind

pytestmark = pytest.mark.integration

HISTORY = {
    "enabled": True,
    "policy": {"type": "recency", "config": {"reasoning": {"enabled": True, "keep_last_blocks": 1}}},
    "schedule": {"type": "turn_chunked_recency", "actions_per_chunk": 4},
}
SAFE = {"type": "resources_servers", "implementation": "workers.gym.safe.app"}
REPOSITORY = {"type": "resources_servers", "implementation": "workers.gym.swe_lite.app"}
MODEL = {"type": "responses_api_models", "implementation": "vllm_model_with_compaction"}
UNREACHABLE = {"base_url": "http://127.0.0.1:9/v1", "endpoint_connection_retries": 2}


def agent(resources: str, model: str = "model") -> dict[str, Any]:
    references = {
        "model_server": {"type": "responses_api_models", "name": model},
        "resources_server": {"type": "resources_servers", "name": resources},
    }
    config = {"max_steps": 10, "context_history": HISTORY, **references}
    return {"type": "responses_api_agents", "implementation": "simple_agent_with_compaction", "config": config}


@pytest.fixture(scope="module")
def model() -> Iterator[StubModel]:
    with StubModel(lambda messages: Reply("nothing", answer="done")) as stub:
        yield stub


@pytest.fixture(scope="module")
def servers(
    launch: Callable[..., Launcher], model: StubModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Addresses of the servers of both environments."""
    workspaces = {"workspaces_dir": str(tmp_path_factory.mktemp("workspaces"))}
    gym = {
        "port": 0,
        "servers": {
            "model": MODEL,
            "dead_model": {**MODEL, "config": UNREACHABLE},
            "safe": SAFE,
            "repository": {**REPOSITORY, "config": workspaces},
            "safe_agent": agent("safe"),
            "repair_agent": agent("repository"),
            "unlucky_agent": agent("safe", "dead_model"),
        },
    }
    return launch(gym, {"endpoints": [model.url], "embedded": {"reasoning_parser": "deepseek_r1"}}).urls


def play(url: str, task: dict[str, Any], rollout: str = "run.step-0.group-0.rollout-0") -> httpx.Response:
    body = {**task, "_ng_rollout_id": rollout, "context_compaction_rollout_id": rollout}
    return httpx.post(f"{url}/run", json=body, timeout=60)


def scripted(commands: list[str]) -> Policy:
    """Runs the commands one after another, then stops."""

    def policy(messages: list[Message]) -> Reply:
        number = sum(message["role"] == "assistant" for message in messages)
        if number == len(commands):
            return Reply("fixed", answer="done")
        return Reply(f"step {number}", "bash", {"command": commands[number]})

    return policy


def calls_by_segment(answer: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Evidence of the model calls of a /run answer, segment by segment."""
    evidence = [item for item in answer["response"]["output"] if item.get("generation_token_ids")]
    segments: dict[int, list[dict[str, Any]]] = {}
    for item, call in zip(evidence, answer["response"]["model_call_metadata"], strict=True):
        segments.setdefault(call["segment_index"], []).append(item)
    return list(segments.values())


def test_an_episode_is_scored_and_carries_evidence_of_every_call(servers: dict[str, str], model: StubModel) -> None:
    model.policy = splitting
    model.requests.clear()
    answer = play(servers["safe_agent"], row(seed=11))  # a code that halving opens within eight turns
    assert answer.status_code == 200, answer.text
    assert answer.json()["reward"] == answer.json()["open_dials"] / 3 == 1.0
    segments = calls_by_segment(answer.json())
    assert sum(map(len, segments)) == len(model.requests)
    for call in (call for segment in segments for call in segment):
        assert len(call["generation_log_probs"]) == len(call["generation_token_ids"])


def test_compaction_starts_a_segment_and_within_one_prompts_only_grow(
    servers: dict[str, str], model: StubModel
) -> None:
    model.policy = splitting
    segments = calls_by_segment(play(servers["safe_agent"], row(seed=11)).json())
    assert [len(segment) for segment in segments][:-1] == [4] * (len(segments) - 1)
    assert len(segments) >= 2
    for segment in segments:
        for call, after in itertools.pairwise(segment):
            whole = call["prompt_token_ids"] + call["generation_token_ids"]
            assert after["prompt_token_ids"][: len(whole)] == whole
    last, first = segments[0][-1], segments[1][0]
    assert first["prompt_token_ids"][: len(last["prompt_token_ids"])] != last["prompt_token_ids"]


def test_vllm_is_never_asked_to_mask_tokens_by_a_grammar(servers: dict[str, str], model: StubModel) -> None:
    model.policy = splitting
    model.requests.clear()
    play(servers["safe_agent"], row(seed=1))
    for request in model.requests:
        assert request.get("parallel_tool_calls") is not False
        assert not any(tool["function"].get("strict") for tool in request["tools"])
        assert request["return_token_ids"] is request["logprobs"] is True


def test_an_unknown_tool_costs_a_turn(servers: dict[str, str], model: StubModel) -> None:
    model.policy = lambda messages: (
        Reply("?", answer="done") if len(messages) > 1 else Reply("?", "open_sesame", {"dial": 1, "digit": 1})
    )
    answer = play(servers["safe_agent"], row(seed=1)).json()
    assert (answer["reward"], answer["turns_left"]) == (0, TURNS - 1)
    assert any(item.get("output") == '{"error": "bad call"}' for item in answer["response"]["output"])


def test_a_row_without_a_seed_is_refused_before_anything_is_generated(
    servers: dict[str, str], model: StubModel
) -> None:
    model.requests.clear()
    task = row(seed=1)
    del task["safe_seed"]
    answer = play(servers["safe_agent"], task)
    assert answer.status_code == 500
    assert "safe_seed" in answer.text
    assert httpx.post(f"{servers['safe']}/seed_session", json=task, timeout=60).status_code == 422
    assert model.requests == []


def test_a_lost_session_is_an_error_and_not_a_reward_of_zero(servers: dict[str, str]) -> None:
    answer = play(servers["safe_agent"], row(seed=1)).json()
    body = {**row(seed=1), "response": answer["response"]}
    verify = httpx.post(f"{servers['safe']}/verify", json=body, timeout=60)
    assert verify.status_code == 500
    assert "session_lost" in verify.text


def test_a_model_that_cannot_be_reached_ends_the_rollout_with_an_error(servers: dict[str, str]) -> None:
    answer = play(servers["unlucky_agent"], row(seed=1))
    assert answer.status_code == 500
    assert "ClientConnectorError" in answer.text


def repair_task() -> dict[str, Any]:
    tasks = (repository_root() / "workers/gym/swe_lite/tasks.jsonl").read_text().splitlines()
    return json.loads(tasks[0])


def test_a_repaired_repository_earns_the_reward(servers: dict[str, str], model: StubModel) -> None:
    fix = "sed -i 's|total // size|-(-total // size)|' paginate.py"
    model.policy = scripted(
        ["ls", "cat paginate.py", "pwd", fix, "python -c 'import paginate as p; print(p.page_count(10, 4))'"]
    )
    answer = play(servers["repair_agent"], repair_task()).json()
    assert (answer["reward"], answer["test_returncode"]) == (1, 0)
    assert len(calls_by_segment(answer)) == 2
    outputs = [json.loads(i["output"]) for i in answer["response"]["output"] if i["type"] == "function_call_output"]
    assert outputs[0] == {"returncode": 0, "output": "README.md\npaginate.py\n"}
    assert outputs[-1]["output"] == "3\n"


def test_a_second_attempt_shows_the_policy_the_same_texts(servers: dict[str, str], model: StubModel) -> None:
    model.policy = scripted(["pwd", "cat nothing.py", "python -c 'import paginate; print(paginate.page)'"])
    first, second = (play(servers["repair_agent"], repair_task()).json() for _ in range(2))
    assert first["reward"] == second["reward"] == 0
    prompts = [[c["prompt_token_ids"] for s in calls_by_segment(answer) for c in s] for answer in (first, second)]
    assert prompts[0] == prompts[1]


def test_sigterm_stops_the_servers(launch: Callable[..., Launcher]) -> None:
    launcher = launch({"port": 0, "servers": {"safe": SAFE}})
    assert httpx.get(launcher.urls["safe"], timeout=60).status_code == 200
    assert launcher.stop() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(launcher.urls["safe"], timeout=60)


def test_a_port_in_use_is_named(refusal: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        output = refusal({"port": port, "servers": {"safe": SAFE}})
    assert f"Port {port} on 127.0.0.1, meant for gym.servers.safe, cannot be used" in output


def test_all_servers_that_cannot_be_built_are_named(refusal: Callable[..., str]) -> None:
    servers = {
        "good": SAFE,
        "unknown": {**SAFE, "implementation": "no_such_thing"},
        "nowhere": {**SAFE, "implementation": "workers.gym.nowhere.app"},
        "misspelt": {**REPOSITORY, "config": {"command_timeout": 3}},
        "invalid": {**REPOSITORY, "config": {"command_timeout_s": "long"}},
    }
    output = refusal({"port": 0, "servers": servers})
    assert "gym.servers.unknown.implementation: there is no 'no_such_thing'" in output
    assert "gym.servers.nowhere.implementation: there is no 'workers.gym.nowhere.app'" in output
    assert "gym.servers.misspelt.config: RepositoryServer has no setting 'command_timeout'" in output
    assert "Did you mean 'command_timeout_s'?" in output
    assert "gym.servers.invalid.config is not valid for RepositoryServer: command_timeout_s" in output
    assert "good" not in output


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_servers_listen_on_the_interface_they_are_given(host: str) -> None:
    recipe = Recipe.model_validate(
        {"run": {"model": "m", "dataset": "d"}, "gym": {"port": 0, "servers": {"safe": SAFE, "repository": REPOSITORY}}}
    )
    sockets = bind(recipe, host)
    try:
        assert [bound.getsockname()[0] for bound in sockets.values()] == [host, host]
    finally:
        for bound in sockets.values():
            bound.close()
