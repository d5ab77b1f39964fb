"""An endpoint of the exact-token route over plain HTTP, and one that spoils the answers of another."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

from workers.gym.policy_model.endpoint import GENERATE, Endpoint
from workers.gym.policy_model.errors import GenerationUnavailable, failure_of

Body = dict[str, Any]


class HttpEndpoint:
    """One vLLM server; `sent` are the requests with their paths, `generating` is set when a generation was sent."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60.0)
        self.sent: list[tuple[str, Body]] = []
        self.generating = asyncio.Event()

    async def __aenter__(self) -> "HttpEndpoint":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Body:
        return self._json(await self._client.get(path), path)

    async def post(self, path: str, body: Body) -> Body:
        self.sent.append((path, body))
        if path == GENERATE:
            self.generating.set()
        try:
            return self._json(await self._client.post(path, json=body), path)
        except httpx.TransportError as error:
            raise GenerationUnavailable(repr(error)) from error

    def _json(self, response: httpx.Response, path: str) -> Body:
        if response.status_code != httpx.codes.OK:
            raise failure_of(response.status_code, response.content, path)
        return response.json()


class Spoiled:
    """Another endpoint whose generated answers are changed on the way: `change` gets the answer and edits it."""

    def __init__(self, endpoint: Endpoint, change: Callable[[Body], None]) -> None:
        self._endpoint = endpoint
        self._change = change

    async def get(self, path: str) -> Body:
        return await self._endpoint.get(path)

    async def post(self, path: str, body: Body) -> Body:
        answer = await self._endpoint.post(path, body)
        if path == GENERATE:
            self._change(answer)
        return answer
