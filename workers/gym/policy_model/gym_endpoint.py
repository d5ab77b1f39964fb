"""NeMo-Gym's HTTP client of a vLLM server, as an endpoint of the exact-token route."""

# pyright: reportMissingImports=false
# (runs in the NeMo-Gym environment; type checks run in Onbelay's)

from typing import Any

import orjson
from aiohttp import ClientError, ClientResponseError
from nemo_gym.openai_utils import NeMoGymAsyncOpenAI

from workers.gym.policy_model.errors import ContinuityBroken, GenerationUnavailable, failure_of


class GymEndpoint:
    """Keeps NeMo-Gym's headers, retries of 5xx answers and bound on connection attempts."""

    def __init__(self, client: NeMoGymAsyncOpenAI) -> None:
        self._client = client
        self._root = client.base_url.removesuffix("/v1")

    async def get(self, path: str) -> dict[str, Any]:
        """The answer's JSON."""
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's JSON."""
        return await self._request("POST", path, json=body)

    async def _request(self, method: str, path: str, **options: Any) -> dict[str, Any]:
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
