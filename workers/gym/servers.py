"""Builds real NeMo-Gym servers as their own `run_webserver` does, without starting them.

So that many can share a process: importing NeMo-Gym takes seconds and 250 MB, once per process.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import difflib
import importlib
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from nemo_gym.mcp_auto_exposure import maybe_auto_expose
from nemo_gym.server_utils import (
    ServerClient,
    SimpleServer,
    _validation_exception_handler,
    get_first_server_config_dict,
    get_global_config_dict,
    initialize_ray,
)
from omegaconf import OmegaConf
from pydantic import BaseModel, ValidationError

from configs.gym import GymConfig, GymServerConfig
from workers.gym.errors import GymStartError
from workers.gym.global_config import is_vllm_model


class BuiltServer(NamedTuple):
    """A server and its web application."""

    name: str
    instance: SimpleServer
    app: FastAPI


def build_servers(gym: GymConfig) -> list[BuiltServer]:
    """All servers, in order; if any cannot be built, one error names all that cannot."""
    built: list[BuiltServer] = []
    problems: list[str] = []
    for name, server in gym.servers.items():
        try:
            built.append(_build_server(name, server))
        except GymStartError as error:
            problems.append(str(error))
    if problems:
        raise GymStartError("\n\n".join(problems))
    return built


def _build_server(name: str, server: GymServerConfig) -> BuiltServer:
    """With liveness, error and cancellation handling, as in NeMo-Gym."""
    server_class = _server_class(name, server)
    if server_class.ray_enabled is not False:
        initialize_ray()
    instance = server_class(config=_config(name, server_class), server_client=_client())
    if is_vllm_model(server):
        _bound_connection_retries(instance)
    instance.setup_telemetry()
    app = instance.setup_webserver()
    if getattr(instance.config, "expose_tools_over_mcp", False):
        maybe_auto_expose(instance, app)
    instance.setup_liveness(app)
    instance.setup_exception_middleware(app)
    instance.setup_cancellation_middleware(app)
    instance.instrument_app_for_telemetry(app)
    app.exception_handler(RequestValidationError)(_validation_exception_handler)
    return BuiltServer(name, instance, app)


def _server_class(name: str, server: GymServerConfig) -> type[SimpleServer]:
    own = "." in server.implementation
    module_name = server.implementation if own else f"{server.type}.{server.implementation}.app"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if module_name == error.name or module_name.startswith(f"{error.name}."):
            raise GymStartError(
                f"gym.servers.{name}.implementation: there is no {server.implementation!r} "
                f"(looked for the module {module_name}). Give a name of NeMo-Gym's {server.type}, "
                "or the module path of an own server."
            ) from error
        raise GymStartError(
            f"gym.servers.{name}: {server.implementation} needs the Python module {error.name!r}, which is not "
            "installed in the NeMo-Gym environment. Install it there."
        ) from error
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, SimpleServer) and value.__module__ == module_name
    ]
    if not classes:
        raise GymStartError(f"gym.servers.{name}: the module {module_name} defines no NeMo-Gym server.")
    return classes[-1]


def _config(name: str, server_class: type[SimpleServer]) -> BaseModel:
    config_class: type[BaseModel] = server_class.model_fields["config"].annotation
    settings: dict[str, Any] = OmegaConf.to_container(
        get_first_server_config_dict(get_global_config_dict(), name), resolve=True
    )
    known = {"name", *config_class.model_fields}
    for key in settings:
        if key not in known and config_class.model_config.get("extra") != "allow":
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise GymStartError(f"gym.servers.{name}.config: {server_class.__name__} has no setting {key!r}.{hint}")
    try:
        return config_class.model_validate(settings | {"name": name})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise GymStartError(
            f"gym.servers.{name}.config is not valid for {server_class.__name__}: {problems}."
        ) from error


def _client() -> ServerClient:
    return ServerClient(
        head_server_config=ServerClient.load_head_server_config(), global_config_dict=get_global_config_dict()
    )


def _bound_connection_retries(instance: SimpleServer) -> None:
    """Let a call to a dead vLLM server fail. NeMo-Gym does so only for one endpoint that is published in a file."""
    for client in instance._clients:
        client.max_connection_retries = instance.config.endpoint_connection_retries
