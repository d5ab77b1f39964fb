"""Starts every Gym server of a recipe in this one process, on loopback by default, and stops them all on SIGTERM.

    python -m workers.gym.serve --recipe FILE [--host ADDRESS]

Runs in the NeMo-Gym environment. Prints a line per server once all of them answer. If anything is wrong with the
recipe, a port, the ledger or the served policy, it prints one paragraph and exits with 1, with nothing served.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.load import load_recipe
from configs.recipe import Recipe
from workers.gym.addresses import HOST
from workers.gym.errors import GymStartError
from workers.gym.global_config import global_config, is_policy_model

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACE_S = 0.5  # as NeMo-Gym: requests in flight are cancelled, agents stop calling the model


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.gym.serve", description="Serve the Gym servers of a recipe."
    )
    parser.add_argument("--recipe", type=Path, required=True, help="YAML file with all addresses filled in")
    parser.add_argument("--host", default=HOST, help="interface to listen on, 0.0.0.0 for all; nothing asks for a key")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe)
        sockets = bind(recipe, arguments.host)
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(
            global_config(recipe, {name: bound.getsockname()[1] for name, bound in sockets.items()})
        )
        asyncio.run(serve(recipe, sockets))
    except (ConfigError, GymStartError) as error:
        print(f"The Gym servers cannot be started. {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def bind(recipe: Recipe, host: str = HOST) -> dict[str, socket.socket]:
    """Take every port before the slow imports, so that a port in use is told at once. The servers ask each other on
    loopback, whatever else they listen on."""
    if not recipe.gym.servers:
        raise GymStartError("The recipe has no `gym.servers`; with `gym.agents` the servers are started elsewhere.")
    sockets: dict[str, socket.socket] = {}
    for index, name in enumerate(recipe.gym.servers):
        port = recipe.gym.port + index if recipe.gym.port else 0
        sockets[name] = socket.socket()
        sockets[name].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sockets[name].bind((host, port))
            sockets[name].listen()
        except (OSError, OverflowError) as error:
            raise GymStartError(
                f"Port {port} on {host}, meant for gym.servers.{name}, cannot be used: {error}. Stop the process that "
                f"listens there, or set `gym.port` to the first of {len(recipe.gym.servers)} free ports."
            ) from error
    return sockets


async def serve(recipe: Recipe, sockets: dict[str, socket.socket]) -> None:
    """Build all servers, connect those that record with the ledger, serve until SIGTERM or SIGINT."""
    # Here, because the imports of the Gym environment take seconds and the ports are checked first.
    from nemo_gym.server_utils import get_global_aiohttp_client, is_global_aiohttp_client_setup

    from workers.gym.servers import build_servers

    if any(is_policy_model(server) for server in recipe.gym.servers.values()):
        from workers.gym.recording import install_capture, policy_models, recording

        install_capture()
        built = build_servers(recipe.gym)
        ledger = recording(recipe.storage, policy_models(built))
    else:
        built = build_servers(recipe.gym)
        ledger = contextlib.nullcontext()
    try:
        async with ledger:
            await _serve([server.app for server in built], sockets)
    finally:
        if is_global_aiohttp_client_setup():
            await get_global_aiohttp_client().close()


async def _serve(apps: list["FastAPI"], sockets: dict[str, socket.socket]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # one handler for all servers, below

    options = {
        "log_level": "warning",
        "access_log": False,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE_S,
    }
    servers = [Server(uvicorn.Config(app, **options)) for app in apps]

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as tasks:
        for server, bound in zip(servers, sockets.values(), strict=True):
            tasks.create_task(server.serve(sockets=[bound]))
        while not all(server.started or server.should_exit for server in servers):
            await asyncio.sleep(0.02)
        failed = [name for name, server in zip(sockets, servers, strict=True) if not server.started]
        if failed:
            stop()
        else:
            for name, bound in sockets.items():
                print(f"{name} http://{HOST}:{bound.getsockname()[1]}", flush=True)
            print("ready", flush=True)
    if failed:
        raise GymStartError(f"{', '.join(failed)}: the server stopped while it started; its log above says why.")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the exit handlers of NeMo-Gym's dependencies take seconds and have nothing left to do
