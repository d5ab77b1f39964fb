"""One `/run` call of a NeMo-Gym server, an agent's or an environment's, with a deadline and a bounded answer.

Cancelling the call closes the connection, and NeMo-Gym then cancels the agent.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from activities.errors import (
    AgentFailed,
    AgentRefused,
    AgentUnavailable,
    IntegrityError,
    RolloutTimeout,
    bucket_of_status,
)

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 4000


class GymAgents:
    """The servers that run rollouts, by the name that dataset rows use: agents, and environments with their own
    protocol."""

    def __init__(
        self, urls: Mapping[str, str], max_connections: int, environments: Mapping[str, str] | None = None
    ) -> None:
        self._environments = frozenset(environments or ())
        self._urls = {name: url.rstrip("/") for name, url in [*urls.items(), *(environments or {}).items()]}
        # A server may close an idle connection at any time: no rollout starts on a used one.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def runs_episodes(self, name: str) -> bool:
        """Whether this is an environment server, which speaks of episodes."""
        return name in self._environments

    async def run(self, agent: str, body: dict[str, Any], *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
        """POST `body` to the `/run` of an agent or environment and return its answer.

        Raises:
            AgentRefused: unknown name, or a 4xx other than 408 and 429.
            AgentFailed: 5xx, 408 or 429.
            AgentUnavailable: refused, reset or broken connection.
            RolloutTimeout: no complete answer within `timeout_s`.
            IntegrityError: the answer is not a JSON object or longer than `max_bytes`.
        """
        url = self._urls.get(agent)
        if url is None:
            known = ", ".join(sorted(self._urls)) or "none"
            where = "gym.agents and gym.environments have" if self._environments else "gym.agents has"
            raise AgentRefused(f"the row asks for agent {agent!r}, but {where}: {known}")
        try:
            async with asyncio.timeout(timeout_s):
                status, content = await self._post(f"{url}/run", body, max_bytes)
        except TimeoutError as error:
            raise RolloutTimeout(f"{url}/run did not answer within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            text = f"{url}/run: {type(error).__name__} {error}".rstrip()
            raise AgentUnavailable(text, connected=connected) from error
        if status != httpx.codes.OK:
            text = content.decode(errors="replace")
            message = f"NeMo-Gym /run failed with HTTP {status}: {text}"
            raise AgentFailed(message, status) if bucket_of_status(status) == "infra" else AgentRefused(message)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{url}/run answered 200 with malformed JSON: {error}") from error
        if not isinstance(answer, dict):
            raise IntegrityError(f"{url}/run answered 200 with {type(answer).__name__}, expected an object")
        return answer

    async def _post(self, url: str, body: dict[str, Any], max_bytes: int) -> tuple[int, bytes]:
        """The status, and the answer; of an error only its beginning."""
        content = bytearray()
        async with self._client.stream("POST", url, json=body) as response:
            failed = response.status_code != httpx.codes.OK
            async for chunk in response.aiter_bytes():
                content += chunk
                if failed and len(content) >= _MAX_ERROR_BYTES:
                    break
                if not failed and len(content) > max_bytes:
                    raise IntegrityError(f"{url} answered more than rollouts.max_response_bytes ({max_bytes})")
        return response.status_code, bytes(content[:_MAX_ERROR_BYTES] if failed else content)
