"""The fault gate: a proxy before the agent's `/run` and before the model server, which breaks what the trace says.

agent_error: call c is generated and recorded, but its answer is cut off, and the agent raises on it.
http_500: call c, and every later one of the attempt, is answered with 500 and not passed on.
reset: while call c is being generated, the connection of `/run` is reset, towards the worker and towards the agent.
hang: call c is never answered, and not passed on; the attempt ends by its deadline.

It counts the calls of each attempt itself, so a failure strikes at the same call under every policy. A replayed call
counts like a generated one.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import httpx

from benchmarks.goodput.http import HttpAnswer, HttpRequest, end_to_end, read_request
from benchmarks.goodput.trace import Failure, FailureKind
from storage.capture_ids import parse_capture_id

HOST = "127.0.0.1"
RESET_AFTER_S = 0.05  # the model takes about twice as long for a call
Attempt = tuple[str, int]
Plan = Callable[[str, int], Failure | None]

_MODEL_CALL = re.compile(r"^/ng-rollout/(?P<capture_id>[^/]+)/.*v1/responses")
_BROKEN = HttpAnswer(500, [("content-type", "application/json")], b'{"detail": "broken on purpose"}')


class Gate:
    """`plan` says how an attempt at a rollout fails. `struck`: the attempts that did, since the plan was set."""

    def __init__(self) -> None:
        self.struck: dict[Attempt, FailureKind] = {}
        self._plan: Plan | None = None
        self._calls: Counter[Attempt] = Counter()
        self._runs: dict[Attempt, asyncio.WriteTransport] = {}
        self._upstreams: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._http = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)
        self._closing = AsyncExitStack()

    async def __aenter__(self) -> "Gate":
        self._closing.push_async_callback(self._http.aclose)
        for name in ("agent", "model"):
            server = await asyncio.start_server(partial(self._serve, name), HOST, 0)
            self._closing.callback(server.close)
            self._ports[name] = server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._closing.aclose()

    @property
    def agent_url(self) -> str:
        """The agent, for the worker."""
        return f"http://{HOST}:{self._ports['agent']}"

    @property
    def model_port(self) -> int:
        """The model server, for the agent."""
        return self._ports["model"]

    def lead_to(self, *, agent: str, model: str) -> None:
        """The addresses that it stands before."""
        self._upstreams = {"agent": agent, "model": model}

    def follow(self, plan: Plan) -> None:
        """Break by this plan from now on."""
        self._plan = plan
        self.struck, self._calls = {}, Counter()

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The requests of one connection. A client that hangs up ends the request at the other side too."""
        try:
            while request := await read_request(reader):
                answering = asyncio.ensure_future(self._answer(name, request, writer))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answering.done():
                        return
                finally:
                    for task in (answering, gone):
                        task.cancel()
                    await asyncio.gather(answering, gone, return_exceptions=True)
                answer = answering.result()
                writer.write(answer.to_bytes())
                await writer.drain()
        except (httpx.TransportError, ConnectionError):
            pass  # the other side broke, and so does this one
        finally:
            writer.transport.abort()

    async def _answer(self, name: str, request: HttpRequest, writer: asyncio.StreamWriter) -> HttpAnswer:
        if name == "agent":
            return await self._run(request, writer.transport)
        found = _MODEL_CALL.match(request.path)
        if found is None:
            return await self._pass_on(name, request)
        return await self._call(parse_capture_id(found["capture_id"]), request)

    async def _run(self, request: HttpRequest, transport: asyncio.WriteTransport) -> HttpAnswer:
        body = json.loads(request.body)
        attempt = parse_capture_id(body["_ng_rollout_id"])[0], int(body["_ng_attempt_index"])
        self._runs[attempt] = transport
        try:
            return await self._pass_on("agent", request)
        finally:
            del self._runs[attempt]

    async def _call(self, attempt: Attempt, request: HttpRequest) -> HttpAnswer:
        """A model call of an attempt; asked again within the attempt after it broke, it breaks again."""
        failure = None if self._plan is None else self._plan(*attempt)
        number = self._calls[attempt]
        self._calls[attempt] += 1
        if failure is None or number < failure.call:
            return await self._pass_on("model", request)
        self.struck[attempt] = failure.kind
        if failure.kind == "http_500":
            return _BROKEN
        if failure.kind == "hang":
            await asyncio.Event().wait()
        if failure.kind == "reset":
            asyncio.get_running_loop().call_later(RESET_AFTER_S, self._reset, attempt)
            return await self._pass_on("model", request)
        answer = await self._pass_on("model", request)
        return HttpAnswer(answer.status, answer.headers, b'{"id": "cut off"}')

    def _reset(self, attempt: Attempt) -> None:
        if attempt in self._runs:
            self._runs[attempt].abort()

    async def _pass_on(self, name: str, request: HttpRequest) -> HttpAnswer:
        answer = await self._http.request(
            request.method, self._upstreams[name] + request.path, headers=request.headers, content=request.body
        )
        return HttpAnswer(answer.status_code, end_to_end(answer.headers.multi_items()), answer.content)
