"""A recipe's `gym` section as NeMo-Gym's global config: name -> type -> implementation -> settings.

Pure: reads a recipe, imports nothing of NeMo-Gym. Model servers get the policy's endpoints unless the recipe sets them.
With a policy model that records, NeMo-Gym's token capture is on for every agent: it names the rollout of each call, so
that the call can be recorded, and seeded with `rollouts.sampling_seed`.
"""

from collections.abc import Mapping
from typing import Any

from configs.gym import GymServerConfig
from configs.recipe import Recipe
from workers.gym.addresses import HOST
from workers.gym.errors import GymStartError

CONNECTION_RETRIES = 60  # half a second apart: a call to a vLLM server that is down fails after 30 s
POLICY_MODELS = ("workers.gym.policy_model.app", "workers.gym.policy_model.compaction")
# The sink and the resolver are installed in the process: NeMo-Gym finds them by name only on Python 3.12 and later.
TOKEN_CAPTURE = {"enabled": True, "all_agents": True, "rebuild_response": False}
_OWN_KEYS = ("host", "port", "name", "num_workers")


def global_config(recipe: Recipe, ports: Mapping[str, int]) -> dict[str, Any]:
    """The dictionary that NeMo-Gym's servers look each other up in."""
    config: dict[str, Any] = {
        "head_server": {"host": HOST, "port": 0},  # none is started; NeMo-Gym wants the entry
        "dry_run": False,
        "observability_enabled": False,
    }
    if any(is_policy_model(server) for server in recipe.gym.servers.values()):
        config["token_id_capture"] = TOKEN_CAPTURE
    for name, server in recipe.gym.servers.items():
        settings = _settings(recipe, name, server)
        config[name] = {server.type: {server.implementation: {**settings, "host": HOST, "port": ports[name]}}}
    return config


def is_vllm_model(server: GymServerConfig) -> bool:
    """Whether this is a model server in front of vLLM: NeMo-Gym's own ones, and those of this project."""
    named = server.implementation.startswith("vllm_model") or "." in server.implementation
    return server.type == "responses_api_models" and named


def is_policy_model(server: GymServerConfig) -> bool:
    """Whether this model server records its calls in the ledger and replays them."""
    return server.type == "responses_api_models" and server.implementation in POLICY_MODELS


def _settings(recipe: Recipe, name: str, server: GymServerConfig) -> dict[str, Any]:
    _check(recipe, name, server)
    settings: dict[str, Any] = {"entrypoint": "app.py"}
    if is_vllm_model(server):
        settings |= _vllm_settings(recipe)
    if is_policy_model(server):
        settings["sampling_seed"] = recipe.rollouts.sampling_seed
    settings |= server.config
    if is_vllm_model(server) and not settings["base_url"]:
        raise GymStartError(
            f"gym.servers.{name} is a vLLM model server, but the recipe has no address of a vLLM server: "
            f"give `generation.endpoints`, or `gym.servers.{name}.config.base_url`."
        )
    return settings


def _vllm_settings(recipe: Recipe) -> dict[str, Any]:
    generation = recipe.generation
    return {
        "base_url": [f"{str(url).rstrip('/')}/v1" for url in generation.endpoints],
        "api_key": "none",  # vLLM asks for none; NeMo-Gym wants one
        "model": generation.model_name,
        "return_token_id_information": True,
        "request_prompt_and_generation_token_ids": True,
        "uses_reasoning_parser": generation.embedded.reasoning_parser is not None,
        "endpoint_connection_retries": CONNECTION_RETRIES,
    }


def _check(recipe: Recipe, name: str, server: GymServerConfig) -> None:
    if is_policy_model(server) and recipe.storage.dsn is None:
        raise GymStartError(
            f"gym.servers.{name} records every model call in the ledger, but storage.dsn is not set: give the address "
            "of a PostgreSQL database whose tables `onbelay up` has made."
        )
    for key in _OWN_KEYS:
        if key in server.config:
            raise GymStartError(
                f"gym.servers.{name}.config.{key} cannot be set: all servers run in one process on {HOST}, "
                "on `gym.port` and the ports after it. Remove the key."
            )
    for key, value in server.config.items():
        if isinstance(value, Mapping) and set(value) == {"type", "name"}:
            other = recipe.gym.servers.get(value["name"])
            if other is None or other.type != value["type"]:
                raise GymStartError(
                    f"gym.servers.{name}.config.{key} refers to {value['name']!r} of type {value['type']!r}, but "
                    f"gym.servers has only: {', '.join(f'{n} ({s.type})' for n, s in recipe.gym.servers.items())}."
                )
