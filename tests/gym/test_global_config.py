"""What each server of a recipe is told: its address, and for model servers the policy's endpoints."""

from typing import Any

import pytest

from configs.load import load_recipe
from configs.recipe import Recipe
from workers.gym.addresses import server_urls
from workers.gym.errors import GymStartError
from workers.gym.global_config import CONNECTION_RETRIES, global_config, is_policy_model

MODEL = {"type": "responses_api_models", "implementation": "vllm_model_with_compaction"}
POLICY = {"type": "responses_api_models", "implementation": "workers.gym.policy_model.compaction"}
LEDGER = {"dsn": "postgresql://u@h/d"}
SAFE = {"type": "resources_servers", "implementation": "workers.gym.safe.app"}


def agent(model: str = "model", resources: str = "safe") -> dict[str, Any]:
    references = {
        "model_server": {"type": "responses_api_models", "name": model},
        "resources_server": {"type": "resources_servers", "name": resources},
    }
    return {"type": "responses_api_agents", "implementation": "simple_agent", "config": references}


def recipe(servers: dict[str, Any], storage: dict[str, Any] | None = None, **generation: Any) -> Recipe:
    gym = {"port": 9000, "servers": servers}
    run = {"model": "m", "dataset": "d"}
    return Recipe.model_validate({"run": run, "generation": generation, "gym": gym, "storage": storage or {}})


def configured(servers: dict[str, Any], storage: dict[str, Any] | None = None, **generation: Any) -> dict[str, Any]:
    made = recipe(servers, storage, **generation)
    return global_config(made, {name: 9000 + index for index, name in enumerate(servers)})


def test_addresses_follow_the_order_of_the_recipe() -> None:
    made = recipe({"model": MODEL, "safe": SAFE, "agent": agent()})
    assert server_urls(made.gym) == {
        "model": "http://127.0.0.1:9000",
        "safe": "http://127.0.0.1:9001",
        "agent": "http://127.0.0.1:9002",
    }


def test_addresses_need_a_port() -> None:
    made = recipe({"safe": SAFE})
    with pytest.raises(ValueError, match=r"gym\.port is 0"):
        server_urls(made.gym.model_copy(update={"port": 0}))


def test_a_model_server_gets_all_endpoints_of_the_policy() -> None:
    endpoints = ["http://a:8000", "http://b:8000/"]
    config = configured(
        {"model": MODEL}, endpoints=endpoints, model_name="mine", embedded={"reasoning_parser": "qwen3"}
    )
    settings = config["model"]["responses_api_models"]["vllm_model_with_compaction"]
    assert settings["base_url"] == ["http://a:8000/v1", "http://b:8000/v1"]
    assert settings["model"] == "mine"
    assert settings["uses_reasoning_parser"] is True
    assert settings["return_token_id_information"] is settings["request_prompt_and_generation_token_ids"] is True
    assert settings["endpoint_connection_retries"] == CONNECTION_RETRIES
    assert (settings["host"], settings["port"]) == ("127.0.0.1", 9000)


def test_a_policy_model_that_records_gets_the_same_and_identities_for_all_agents() -> None:
    config = configured({"model": POLICY}, LEDGER, endpoints=["http://a:8000"], model_name="mine")
    settings = config["model"]["responses_api_models"]["workers.gym.policy_model.compaction"]
    assert (settings["base_url"], settings["model"]) == (["http://a:8000/v1"], "mine")
    assert settings["return_token_id_information"] is settings["request_prompt_and_generation_token_ids"] is True
    assert config["token_id_capture"] == {"enabled": True, "all_agents": True, "rebuild_response": False}


def test_only_a_policy_model_that_records_is_told_the_sampling_seed() -> None:
    made = recipe({"model": MODEL, "policy": POLICY}, LEDGER, endpoints=["http://a:8000"])
    made = made.model_copy(update={"rollouts": made.rollouts.model_copy(update={"sampling_seed": 5})})
    config = global_config(made, {"model": 9000, "policy": 9001})
    assert config["policy"]["responses_api_models"]["workers.gym.policy_model.compaction"]["sampling_seed"] == 5
    assert "sampling_seed" not in config["model"]["responses_api_models"]["vllm_model_with_compaction"]


def test_without_one_nothing_is_captured() -> None:
    assert "token_id_capture" not in configured({"model": MODEL}, endpoints=["http://a:8000"])


def test_a_policy_model_that_records_needs_a_ledger() -> None:
    with pytest.raises(GymStartError, match=r"gym\.servers\.model records .* storage\.dsn is not set"):
        configured({"model": POLICY}, endpoints=["http://a:8000"])


@pytest.mark.parametrize("name", ["demo", "swe_lite"])
def test_ready_recipes_record_their_policy(name: str) -> None:
    assert any(is_policy_model(server) for server in load_recipe(name).gym.servers.values())


def test_the_recipe_wins_over_what_is_filled_in() -> None:
    own = {"base_url": "http://judge:1/v1", "uses_reasoning_parser": True}
    config = configured({"model": {**MODEL, "config": own}})
    settings = config["model"]["responses_api_models"]["vllm_model_with_compaction"]
    assert (settings["base_url"], settings["uses_reasoning_parser"]) == ("http://judge:1/v1", True)


def test_other_servers_are_told_nothing_of_the_policy() -> None:
    config = configured({"safe": SAFE}, endpoints=["http://a:8000"])
    settings = config["safe"]["resources_servers"]["workers.gym.safe.app"]
    assert settings == {"entrypoint": "app.py", "host": "127.0.0.1", "port": 9000}


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ({"model": MODEL}, r"gym\.servers\.model .*generation\.endpoints"),
        ({"safe": {**SAFE, "config": {"port": 1}}}, r"gym\.servers\.safe\.config\.port cannot be set"),
        ({"safe": SAFE, "agent": agent("model")}, r"config\.model_server refers to 'model'"),
        ({"safe": SAFE, "agent": agent("safe", "safe")}, r"config\.model_server refers to 'safe' of type"),
    ],
)
def test_a_mistake_is_named_by_its_key(servers: dict[str, Any], message: str) -> None:
    with pytest.raises(GymStartError, match=message):
        configured(servers)
