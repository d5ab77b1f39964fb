"""An agent, and its environment, in processes of their own, so that one can die, or fall silent, without the other.

Both are started as NeMo-Gym starts them, in front of the policy model of a GymProcess.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.failures.gym_process import GymProcess
from tests.gym.ports import reserved_port
from workers.environments.paths import child_environment, environment_python
from workers.gym.addresses import HOST
from workers.gym.global_config import TOKEN_CAPTURE

AGENT = "responses_api_agents.simple_agent.app"
ENVIRONMENT = "tests.failures.environment"
START_TIMEOUT_S = 300.0


@contextmanager
def addresses() -> Iterator[dict[str, str]]:
    """URLs of both that nobody else can take, also while nobody listens there. Without `apart_environment` among them
    the agent uses the environment of the GymProcess."""
    with ExitStack() as stack:
        names = ("apart", "apart_environment")
        yield {name: f"http://{HOST}:{stack.enter_context(reserved_port())}" for name in names}


class Apart:
    """One server in one process. `urls`: the addresses of both."""

    def __init__(self, gym: GymProcess, urls: dict[str, str], name: str, module: str, folder: Path) -> None:
        self.url = urls[name]
        self._log = (folder / f"{name}.log").open("w")
        variables = {"NEMO_GYM_CONFIG_DICT": json.dumps(_config(gym, urls)), "NEMO_GYM_CONFIG_PATH": name}
        self.process = subprocess.Popen(
            [environment_python("gym"), "-m", module],
            env={**child_environment(), **variables},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )

    @property
    def lives(self) -> bool:
        """Whether it runs, or is suspended."""
        return self.process.poll() is None

    async def ready(self) -> "Apart":
        """Wait until it answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline:
                assert self.lives, Path(self._log.name).read_text()
                try:
                    await client.get(f"{self.url}/health")
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
                else:
                    return self
        raise AssertionError(f"{self.url} does not answer: {Path(self._log.name).read_text()}")

    def suspend(self) -> None:
        """SIGSTOP: the kernel goes on to accept connections for it, nobody answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, also to a suspended process."""
        self.process.kill()
        self.process.wait()
        self._log.close()


def _config(gym: GymProcess, urls: dict[str, str]) -> dict[str, Any]:
    """NeMo-Gym's global config: who is where."""

    def listening(kind: str, implementation: str, url: str, **config: Any) -> dict[str, Any]:
        address = {"entrypoint": "app.py", "host": HOST, "port": urlsplit(url).port}
        return {kind: {implementation: {**address, **config}}}

    environments = {**gym.urls, **urls}
    environment = "apart_environment" if "apart_environment" in urls else "environment"
    return {
        "head_server": {"host": HOST, "port": 0},
        "dry_run": False,
        "observability_enabled": False,
        "token_id_capture": TOKEN_CAPTURE,
        "policy_model": listening("responses_api_models", "policy_model", gym.urls["policy_model"]),
        environment: listening("resources_servers", "environment", environments[environment]),
        "apart": listening(
            "responses_api_agents",
            "simple_agent",
            urls["apart"],
            max_steps=10,
            model_server={"type": "responses_api_models", "name": "policy_model"},
            resources_server={"type": "resources_servers", "name": environment},
        ),
    }
