"""Client of one vLLM server: every request has a deadline, every failure is typed and names the endpoint.

The server runs with `workers.vllm_extension`, which adds the weight backends and the calls behind `state`,
`problem_with` and `abandon_update`. vLLM hangs when weights change while requests run: updates are for paused servers.
After a failed update the model is unusable until one succeeds.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from activities.generation.errors import ServerFailed, ServerUnreachable, WeightsUnknown
from configs.generation import GenerationConfig

PauseMode = Literal["wait", "keep", "abort"]
QUERY_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
_MAX_ERROR_CHARS = 400
_LABEL = re.compile(r"policy-(\d+)")


@dataclass(frozen=True)
class ServerState:
    """What a server serves. `process` differs after every start; `digest` is None until a load was finished."""

    process: str
    label: str
    digest: str | None
    paused: bool


@dataclass(frozen=True)
class PolicyVersions:
    """Oldest and newest policy version among the endpoints, and the server processes that serve them.

    Equal `processes` before and after a piece of work mean that no server was started again in between.
    """

    min: int
    max: int
    processes: tuple[str, ...]


class VllmServer:
    """One endpoint. Close it after use, or use it as an asynchronous context."""

    def __init__(self, url: str, *, refit_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._refit_timeout_s = refit_timeout_s
        # vLLM drops the connection after a 500, and a server may be restarted: no request starts on a used connection.
        self._http = httpx.AsyncClient(
            base_url=self.url, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    async def __aenter__(self) -> "VllmServer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def health(self) -> None:
        """Return when the server can generate."""
        await self._request("GET", "/health", QUERY_TIMEOUT_S)

    async def weight_version(self) -> str:
        """The label of the weights; `default` after a start."""
        return str((await self._request("GET", "/weight_info", QUERY_TIMEOUT_S))["weight_version"])

    async def is_paused(self) -> bool:
        """Whether generation is paused; requests queue meanwhile."""
        return bool((await self._request("GET", "/is_paused", QUERY_TIMEOUT_S))["is_paused"])

    async def state(self) -> ServerState:
        """Label, digest, pause and process."""
        served = await self._call_workers("served_weights")
        return ServerState(
            process=str(served["process"]),
            label=await self.weight_version(),
            digest=served["digest"],
            paused=await self.is_paused(),
        )

    async def problem_with(self, path: str) -> str | None:
        """Why the server cannot load this folder, if so; touches nothing."""
        return (await self._call_workers("problem_with_weights", path))["problem"]

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling. `wait` returns when the running requests have finished."""
        await self._request("POST", "/pause", self._refit_timeout_s, params={"mode": mode})

    async def resume(self) -> None:
        """Schedule again. Only after a load that succeeded."""
        await self._request("POST", "/resume", QUERY_TIMEOUT_S)

    async def world_size(self) -> int:
        """How many worker processes take the weights."""
        return int((await self._request("GET", "/get_world_size", QUERY_TIMEOUT_S))["world_size"])

    async def abandon_update(self) -> None:
        """Close an update that a killed client left open. The model is unusable until another one is finished."""
        await self._call_workers("abandon_weight_update")

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Connect the weight transfer of the server's backend."""
        await self._refit_request("/init_weight_transfer_engine", json={"init_info": init_info})

    async def start_update(self) -> None:
        """Put the model into loading mode."""
        await self._refit_request("/start_weight_update")

    async def update(self, update_info: dict[str, Any]) -> None:
        """Load what `update_info` names. Only for a paused server: otherwise this never ends."""
        await self._refit_request("/update_weights", json={"update_info": update_info})

    async def finish_update(self, label: str) -> None:
        """Serve what was loaded, under this label, and forget keys and values of the old weights."""
        await self._refit_request("/finish_weight_update", json={"weight_version": label})
        await self._request("POST", "/reset_prefix_cache", QUERY_TIMEOUT_S)

    async def end_transfer(self) -> None:
        """Disconnect the weight transfer."""
        await self._request("POST", "/shutdown_weight_transfer_engine", QUERY_TIMEOUT_S)

    async def _refit_request(self, path: str, **options: Any) -> None:
        await self._request("POST", path, self._refit_timeout_s, **options)

    async def _call_workers(self, method: str, *args: str) -> dict[str, Any]:
        """Run a method of the worker extension on every worker process; the answer of the first."""
        body = {"method": method, "args": list(args)}
        answer = await self._request("POST", "/collective_rpc", self._refit_timeout_s, json=body)
        results = answer.get("results")
        if not results or not isinstance(results[0], dict):
            raise ServerFailed(
                f"vLLM at {self.url} answered {method} with {answer!r}. Start it with "
                "--worker-extension-cls workers.vllm_extension.PolicyWorker."
            )
        return results[0]

    async def _request(self, method: str, path: str, timeout_s: float, **options: Any) -> dict[str, Any]:
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s + CONNECT_TIMEOUT_S):
                response = await self._http.request(method, path, timeout=timeout, **options)
        except (httpx.TransportError, TimeoutError) as error:
            cause = str(error) or f"{type(error).__name__} after {timeout_s:g} s"
            raise ServerUnreachable(f"vLLM at {self.url} did not answer {method} {path}: {cause}.") from error
        if response.status_code != httpx.codes.OK:
            raise ServerFailed(
                f"vLLM at {self.url} answered {method} {path} with {response.status_code}: "
                f"{response.text[:_MAX_ERROR_CHARS]}{_hint(response.status_code)}"
            )
        try:
            answer = response.json() if response.content else {}
        except ValueError as error:
            raise ServerFailed(
                f"vLLM at {self.url} answered {method} {path} with something that is not JSON."
            ) from error
        if not isinstance(answer, dict):
            raise ServerFailed(
                f"vLLM at {self.url} answered {method} {path} with {type(answer).__name__}, not an object."
            )
        return answer


def servers_of(config: GenerationConfig) -> tuple[VllmServer, ...]:
    """A client for every endpoint of the configuration."""
    return tuple(VllmServer(str(url), refit_timeout_s=config.refit_timeout_s) for url in config.endpoints)


async def policy_version(servers: Sequence[VllmServer]) -> PolicyVersions:
    """Versions that the endpoints serve; `WeightsUnknown` when one of them was started again and not refitted yet."""
    states = await asyncio.gather(*(server.state() for server in servers))
    versions = [_version(server, state) for server, state in zip(servers, states, strict=True)]
    return PolicyVersions(min(versions), max(versions), tuple(state.process for state in states))


def _version(server: VllmServer, state: ServerState) -> int:
    match = _LABEL.fullmatch(state.label)
    if match is None or state.digest is None:
        raise WeightsUnknown(
            f"vLLM at {server.url} serves weights named {state.label!r}, which no refit stamped: "
            "the server was started again and has to be refitted before it samples for a step."
        )
    return int(match[1])


def _hint(status: int) -> str:
    return " (vLLM has this route only with VLLM_SERVER_DEV_MODE=1)" if status == httpx.codes.NOT_FOUND else ""
