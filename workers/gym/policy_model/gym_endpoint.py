"""NeMo-Gym's HTTP client of a vLLM server, as an endpoint of the exact-token route.

A request fails when its endpoint is quarantined meanwhile: a server that is paused, or hangs, never answers.
"""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

import asyncio
from typing import Any

import orjson
from aiohttp import ClientError, ClientResponseError
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI

from workers.gym.policy_model.errors import ContinuityBroken, GenerationUnavailable, failure_of


class GymEndpoint:
    """Keeps NeMo-Gym's headers, retries of 5xx answers and bound on connection attempts. `away` is set while the
    endpoint is in quarantine; None: it never is."""

    def __init__(self, client: NeMoGymAsyncOpenAI, away: asyncio.Event | None = None) -> None:
        self._client = client
        self._away = away
        self._root = client.base_url.removesuffix("/v1")

    async def get(self, path: str) -> dict[str, Any]:
        """The answer's JSON."""
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's JSON."""
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if self._away is None:
            return await self._asked(method, path, **options)
        asking = asyncio.create_task(self._asked(method, path, **options))
        leaving = asyncio.create_task(self._away.wait())
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            raise GenerationUnavailable(f"vLLM at {self._root} is in quarantine ({path}): it missed a refit")
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)

    async def _asked(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = await self._client._request(method=method, url=self._root + path, **options)
            content = await response.read()
        except ClientResponseError as error:  # the last of NeMo-Gym's retries
            raise failure_of(error.status, getattr(error, "response_content", b""), path) from error
        except (ClientError, OSError) as error:
            raise GenerationUnavailable(f"vLLM at {self._root} is not reachable ({path}): {error!r}") from error
        if not response.ok:
            raise failure_of(response.status, content, path)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:  # a log-probability of NaN, for instance
            raise ContinuityBroken(f"vLLM's answer to {path} is no valid JSON: {error}") from error
