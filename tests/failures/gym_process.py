"""One process of real NeMo-Gym servers, on ports that stay the same when it is killed and started again."""

import asyncio
import os
import signal
import socket
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import yaml

from storage.capture_ids import capture_id
from tests.gym.launcher import Launcher
from workers.gym.addresses import HOST
from workers.stack.ports import free_ports

COMPACTION = {"type": "recency", "config": {"reasoning": {"enabled": True, "keep_last_blocks": 1}}}
UNLIMITED, RESCUED, REFUSED = 100_000, 800, 600  # tokens of a prompt at the context guard
EPISODE_TIMEOUT_S = 2.0  # of the hurried environment server
DEADLINE_S = 180.0


def servers(unrecorded_url: str) -> dict[str, Any]:
    """Agents of all kinds, behind the recording model servers; environment servers; and an agent behind a server that
    does not record."""
    return {
        "policy_model": _server("responses_api_models", "workers.gym.policy_model.app"),
        "compacting_model": _server("responses_api_models", "workers.gym.policy_model.compaction"),
        "unrecorded_model": _server("responses_api_models", "vllm_model", base_url=f"{unrecorded_url}/v1"),
        "environment": _server("resources_servers", "tests.failures.environment"),
        "simple": _agent("simple_agent", "policy_model"),
        "compacting": _agent("simple_agent_with_compaction", "compacting_model", context_history=_history(2)),
        "guarded": _agent("simple_agent_with_compaction", "compacting_model", context_history=_history(9, REFUSED)),
        "rescued": _agent("simple_agent_with_compaction", "compacting_model", context_history=_history(9, RESCUED)),
        "unverified": _agent("simple_agent_with_compaction", "compacting_model", skip_verification=True),
        "unrecorded": _agent("simple_agent", "unrecorded_model"),
        "episodes": _episodes(),
        "hurried": _episodes(default_episode_timeout_seconds=EPISODE_TIMEOUT_S),
    }


def _server(kind: str, implementation: str, **config: Any) -> dict[str, Any]:
    return {"type": kind, "implementation": implementation, "config": config}


def _agent(implementation: str, model: str, **config: Any) -> dict[str, Any]:
    references = {
        "model_server": {"type": "responses_api_models", "name": model},
        "resources_server": {"type": "resources_servers", "name": "environment"},
    }
    return _server("responses_api_agents", implementation, max_steps=10, **references, **config)


def _episodes(**config: Any) -> dict[str, Any]:
    return _server(
        "environment_servers",
        "tests.failures.episodes",
        resources_server={"type": "resources_servers", "name": "environment"},
        agent_server={"type": "responses_api_agents", "name": "simple"},
        resources_tool_transports=["direct_http"],
        cleanup_timeout_seconds=10.0,
        **config,
    )


def _history(actions_per_chunk: int, max_total_tokens: int = UNLIMITED) -> dict[str, Any]:
    return {
        "enabled": True,
        "policy": COMPACTION,
        "schedule": {"type": "turn_chunked_recency", "actions_per_chunk": actions_per_chunk},
        "guards": {"max_total_tokens": max_total_tokens},
    }


def _reserved(count: int) -> tuple[int, ExitStack]:
    """The first of consecutive ports that nobody else is given until the stack is closed, also while no server listens
    there; NeMo-Gym's may."""
    while True:
        first = free_ports(count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    bound = stack.enter_context(socket.socket())
                    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    bound.bind((HOST, port))
            except OSError:
                continue
            return first, stack.pop_all()


class GymProcess:
    """`urls` are the addresses of its servers, by name; `environments` those of its environment servers. `only` these
    are served, if they are named; `sections` are more of its recipe."""

    def __init__(
        self,
        folder: Path,
        vllm_url: str,
        unrecorded_url: str,
        storage: dict[str, Any],
        only: Collection[str] | None = None,
        **sections: dict[str, Any],
    ) -> None:
        configured = {name: one for name, one in servers(unrecorded_url).items() if only is None or name in only}
        port, self._ports = _reserved(len(configured))
        recipe = {
            "run": {"model": "unused", "dataset": "unused"},
            "gym": {"port": port, "servers": configured},
            "generation": {"endpoints": [vllm_url], "embedded": {"reasoning_parser": "deepseek_r1"}},
            "storage": storage,
            **sections,
        }
        self._recipe = folder / "gym.yaml"
        self._recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
        self.urls = {name: f"http://{HOST}:{port + index}" for index, name in enumerate(configured)}
        self.environments = {name: url for name, url in self.urls.items() if name in ("episodes", "hurried")}
        self._launcher: Launcher | None = None

    async def start(self) -> None:
        """Return when every server answers."""
        self._launcher = Launcher(self._recipe)
        await asyncio.to_thread(self._launcher.wait_until_ready)

    def kill(self) -> None:
        """SIGKILL, also to a suspended process."""
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher = None

    def __enter__(self) -> "GymProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._ports.close()

    def suspend(self) -> None:
        """SIGSTOP: its sockets stay open, nothing in it moves."""
        os.kill(self._pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT."""
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self._launcher is not None
        return self._launcher.process.pid

    async def call_model(self, rollout_id: str, text: str) -> httpx.Response:
        """A model call of attempt 0 of a rollout that is not its agent's."""
        prefix = f"/ng-rollout/{capture_id(rollout_id)}/training-token-capture/v1"
        body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            return await client.post(f"{self.urls['policy_model']}{prefix}/chat/completions", json=body)

    async def verifier(self, mode: str) -> None:
        """`refuse_once`: the next verification fails. `lose_judge_once`: it answers that it has no judge. `hold`: they
        wait until `open`."""
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            (await client.post(f"{self.urls['environment']}/verifier/{mode}")).raise_for_status()

    async def until_verifying(self) -> None:
        """Wait until an agent waits for its reward."""
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client, asyncio.timeout(DEADLINE_S):
            while not (await client.get(f"{self.urls['environment']}/verifier")).json()["waiting"]:
                await asyncio.sleep(0.02)
