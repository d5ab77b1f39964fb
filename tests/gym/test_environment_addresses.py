"""Which of the servers of a recipe run rollouts, by which protocol, and under which names."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.gym import GymConfig
from workers.gym.addresses import agent_urls, environment_urls

AGENT, ENVIRONMENT = "responses_api_agents", "environment_servers"


def gym(**servers: tuple[str, str]) -> GymConfig:
    named = {name: {"type": kind, "implementation": made} for name, (kind, made) in servers.items()}
    return GymConfig.model_validate({"port": 9000, "servers": named})


def test_servers_are_asked_by_the_protocol_they_speak() -> None:
    made = gym(
        model=("responses_api_models", "vllm_model"),
        resources=("resources_servers", "example_multi_step"),
        agent=(AGENT, "simple_agent"),
        episodes=(ENVIRONMENT, "single_agent_turn"),
        own_episodes=(ENVIRONMENT, "my.environments.maze"),
        legacy=(ENVIRONMENT, "legacy_agent"),
        flat=(ENVIRONMENT, "single_agent_turn_legacy"),
    )
    assert agent_urls(made) == {
        "agent": "http://127.0.0.1:9002",
        "legacy": "http://127.0.0.1:9005",
        "flat": "http://127.0.0.1:9006",
    }
    assert environment_urls(made) == {"episodes": "http://127.0.0.1:9003", "own_episodes": "http://127.0.0.1:9004"}


def test_a_name_means_one_server() -> None:
    both = {"agents": {"swe": "http://a:1", "b": "http://a:2"}, "environments": {"swe": "http://a:3"}}
    with pytest.raises(ValidationError, match="swe: in `agents` and in `environments`"):
        GymConfig.model_validate(both)


@pytest.mark.parametrize("running", ["agents", "environments"])
def test_servers_run_already_or_are_started(running: str) -> None:
    both: dict[str, Any] = {
        running: {"swe": "http://a:1"},
        "servers": {"swe": {"type": AGENT, "implementation": "simple_agent"}},
    }
    with pytest.raises(ValidationError, match=rf"give either `{running}` \(running servers\) or `servers`"):
        GymConfig.model_validate(both)
