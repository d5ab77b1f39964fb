"""The Gym servers of the tests of recording and replay: both policy models, each with its agent, and the safe."""

from typing import Any

HISTORY = {
    "enabled": True,
    "policy": {"type": "recency", "config": {"reasoning": {"enabled": True, "keep_last_blocks": 1}}},
    "schedule": {"type": "turn_chunked_recency", "actions_per_chunk": 4},
}
GUARDED = HISTORY | {"guards": {"max_total_tokens": 1_000_000, "reserved_generation_tokens": 100}}
AGENTS = ("plain_agent", "compacting_agent")


def server(kind: str, implementation: str, **config: Any) -> dict[str, Any]:
    return {"type": kind, "implementation": implementation, "config": config}


def agent(implementation: str, model: str, **config: Any) -> dict[str, Any]:
    references = {
        "model_server": {"type": "responses_api_models", "name": model},
        "resources_server": {"type": "resources_servers", "name": "safe"},
    }
    return server("responses_api_agents", implementation, max_steps=10, **references, **config)


SERVERS = {
    "model": server("responses_api_models", "workers.gym.policy_model.app"),
    "compaction_model": server("responses_api_models", "workers.gym.policy_model.compaction"),
    "safe": server("resources_servers", "workers.gym.safe.app"),
    "plain_agent": agent("simple_agent", "model"),
    "compacting_agent": agent("simple_agent_with_compaction", "compaction_model", context_history=HISTORY),
    "guarded_agent": agent("simple_agent_with_compaction", "compaction_model", context_history=GUARDED),
}


def sections(vllm_url: str, storage: dict[str, Any], servers: dict[str, Any] = SERVERS) -> tuple[dict[str, Any], ...]:
    """The sections `gym`, `generation` and `storage` of a recipe."""
    generation = {"endpoints": [vllm_url], "embedded": {"reasoning_parser": "qwen3"}}
    return {"port": 0, "servers": servers}, generation, storage
