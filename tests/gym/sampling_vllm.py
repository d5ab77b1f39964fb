"""A vLLM server with a scripted policy that samples: what it says is scripted, no two samples have equal tokens.

A request with a seed gets the sample that follows from seed, prompt and weights, every time.

It speaks the routes that exact tokens need, over HTTP, with the answers and refusals of the real server:

    with SamplingVllm(policy) as vllm:
        ...                                     # vllm.url
        vllm.fail_next(500, times=3)            # NeMo-Gym's client asks three times
        vllm.hang_next(); vllm.wait_until_hanging(); vllm.release()
        vllm.abort_next(); vllm.drop_next(); vllm.version = "policy-1"; vllm.refit_in_next("policy-2")
        assert len(vllm.generations) == 3

The policy is a function of the prompt's messages; it may raise `Refuse` to fail a call.
"""

import json
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.gym.byte_language import END_OF_TURN, VOCABULARY, decode, encode, messages_of, parsed, rendered, written
from tests.gym.stub_model import Message, Policy

Body = dict[str, Any]
Gone = Callable[[], bool]
Fault = Callable[[Gone], None]
Render = Callable[[list[Message], list[Body] | None, bool], str]

GENERATE = "/inference/v1/generate"
PATIENCE_S = 120.0


class Refuse(Exception):
    """The server answers with an error instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Drop(Exception):
    """The connection is closed without an answer."""


@dataclass(frozen=True)
class Generation:
    """One sampled answer."""

    prompt_token_ids: list[int]
    sampled_token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    weight_versions: list[Body]


class SamplingVllm:
    """Serves on loopback while the context is open. `requests` are (path, body) in the order in which they came."""

    def __init__(
        self, policy: Policy, *, max_model_len: int = 16_384, render: Render = rendered, port: int = 0
    ) -> None:
        self.policy = policy
        self.max_model_len = max_model_len
        self.render = render
        self.version = "policy-0"
        self.requests: list[tuple[str, Body]] = []
        self.generations: list[Generation] = []
        self.hanging = 0
        self._faults: list[tuple[str, Fault]] = []
        self._aborts = 0
        self._next_version: str | None = None
        self._changed = threading.Condition()
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "SamplingVllm":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def fail_next(self, status: int, message: str = "out of order", *, times: int = 1, path: str = GENERATE) -> None:
        """The next requests to a path are answered with a status."""

        def fault(gone: Gone) -> None:
            raise Refuse(status, message)

        self._faults += [(path, fault)] * times

    def drop_next(self, *, times: int = 1, path: str = GENERATE) -> None:
        """The next requests to a path get no answer: the connection is closed."""

        def fault(gone: Gone) -> None:
            raise Drop

        self._faults += [(path, fault)] * times

    def hang_next(self, *, times: int = 1, path: str = GENERATE) -> None:
        """The next requests to a path wait until `release`."""
        self._released.clear()
        self._faults += [(path, self._hang)] * times

    def abort_next(self, *, times: int = 1) -> None:
        """The next generations are given up half way, as by a pause with mode=abort."""
        self._aborts += times

    def refit_in_next(self, version: str) -> None:
        """Weights change in the middle of the next generation."""
        self._next_version = version

    def release(self) -> None:
        """Let hanging requests go on."""
        self._released.set()

    def wait_until_hanging(self, requests: int = 1) -> None:
        """Wait until exactly so many requests hang."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.hanging == requests, PATIENCE_S), f"{self.hanging} hang"

    def answer(self, method: str, path: str, body: Body, gone: Gone) -> Body:
        """One request; `gone` says whether its client has hung up."""
        with self._changed:
            self.requests.append((path, body))
            at = next((at for at, (of, _) in enumerate(self._faults) if of == path), None)
            fault = None if at is None else self._faults.pop(at)[1]
        if fault is not None:
            fault(gone)
        match method, path:
            case "GET", "/health":
                return {}
            case "GET", "/v1/models":
                return {"data": [{"id": "policy", "root": "policy", "max_model_len": self.max_model_len}]}
            case "GET", "/weight_info":
                return {"weight_version": self.version}
            case "POST", "/v1/chat/completions/render":
                return self._render(body)
            case "POST", "/inference/v1/generate":
                return self._generate(body)
            case "POST", "/v1/chat/completions/derender":
                return _derendered(body)
            case "POST", "/tokenize":
                tokens = self._prompt(body)
                return {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        raise Refuse(404, f"no route {method} {path}")

    def _hang(self, gone: Gone) -> None:
        with self._changed:
            self.hanging += 1
            self._changed.notify_all()
        try:
            while not self._released.wait(0.02):
                if gone():
                    raise Drop  # vLLM gives up what nobody waits for
        finally:
            with self._changed:
                self.hanging -= 1
                self._changed.notify_all()

    def _prompt(self, body: Body) -> list[int]:
        return encode(self.render(body["messages"], body.get("tools"), body.get("add_generation_prompt", True)))

    def _render(self, body: Body) -> Body:
        prompt = self._prompt(body)
        if len(prompt) > self.max_model_len:
            raise Refuse(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt contains at "
                f"least {self.max_model_len + 1} input tokens.",
            )
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or self.max_model_len
        sampling: Body = {
            "temperature": body.get("temperature", 1.0),
            "stop": body.get("stop") or [],
            "stop_token_ids": body.get("stop_token_ids") or [],
            "max_tokens": min(wanted, self.max_model_len - len(prompt)),
            "logprobs": body.get("top_logprobs", 0) if body.get("logprobs") else None,
            "seed": body.get("seed"),
        }
        if body.get("response_format") or body.get("parallel_tool_calls") is False:
            sampling["structured_outputs"] = {"json_object": True}
        return {
            "request_id": f"chatcmpl-{secrets.token_hex(8)}",
            "token_ids": prompt,
            "features": None,
            "sampling_params": sampling,
            "model": body.get("model"),
            "stream": False,
        }

    def _generate(self, body: Body) -> Body:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if len(prompt) >= self.max_model_len:
            raise Refuse(
                400,
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of "
                f"{self.max_model_len}.",
            )
        limit = min(sampling["max_tokens"], self.max_model_len - len(prompt))
        if sampling.get("allowed_token_ids"):
            check = _ended(sampling["allowed_token_ids"] * limit, {}, limit)
            return self._answer(body, prompt, random.Random(0), *check, counted=False)
        draw = self._draw(prompt, sampling.get("seed"))
        reply = self.policy(messages_of(decode(prompt)))
        said = encode(written(reply, f" {draw.getrandbits(32):08x}") + "<|im_end|>")
        return self._answer(body, prompt, draw, *_ended(said, sampling, limit), counted=True)

    def _draw(self, prompt: list[int], seed: int | None) -> random.Random:
        """The chance of one call."""
        return random.Random(secrets.token_hex(16) if seed is None else f"{seed}/{self.version}/{prompt}")

    def _answer(
        self,
        body: Body,
        prompt: list[int],
        draw: random.Random,
        sampled: list[int],
        finish: str,
        stop: Any,
        *,
        counted: bool,
    ) -> Body:
        log_probs = [-draw.uniform(0.01, 3.0) for _ in sampled]
        with self._changed:
            spans = self._spans(len(sampled))
            if counted and self._aborts:
                self._aborts -= 1
                half = len(sampled) // 2
                sampled, log_probs, finish, stop = sampled[:half], log_probs[:half], "abort", None
            elif counted:
                self.generations.append(Generation(prompt, sampled, log_probs, finish, spans))
        entries = [
            {"token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": []}
            for token, log_prob in zip(sampled, log_probs, strict=True)
        ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
        return {
            "request_id": f"generate-tokens-{body.get('request_id', secrets.token_hex(8))}",
            "model": body.get("model"),
            "created": int(time.time()),
            "usage": usage | {"total_tokens": len(prompt) + len(sampled)},
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": finish,
                    "stop_reason": stop,
                    "token_ids": sampled,
                    "weight_versions": spans,
                    "logprobs": {"content": entries} if body["sampling_params"].get("logprobs") is not None else None,
                }
            ],
        }

    def _spans(self, sampled: int) -> list[Body]:
        if self._next_version is None:
            return [{"version": self.version, "start": 0, "end": sampled}]
        before, self.version, self._next_version = self.version, self._next_version, None
        return [
            {"version": before, "start": 0, "end": sampled // 2},
            {"version": self.version, "start": sampled // 2, "end": sampled},
        ]


def _ended(tokens: list[int], sampling: Body, limit: int) -> tuple[list[int], str, Any]:
    """The tokens up to where sampling stops, with finish and stop reason."""
    stops = [encode(stop) for stop in sampling.get("stop", ())]
    for end in range(1, min(len(tokens), limit) + 1):
        if tokens[end - 1] == END_OF_TURN:
            return tokens[:end], "stop", None
        if tokens[end - 1] in sampling.get("stop_token_ids", ()):
            return tokens[:end], "stop", tokens[end - 1]
        for stop in stops:
            if tokens[:end][-len(stop) :] == stop:
                return tokens[:end], "stop", decode(stop)
    return tokens[:limit], "length", None


def _derendered(body: Body) -> Body:
    """As the real one: a stop string and an end-of-turn token stay in the text, ids of calls are bare."""
    generated, request = body["generate_response"], body["chat_request"]
    choice = generated["choices"][0]
    if not choice["token_ids"]:
        raise Refuse(400, "choice 0 has empty or null token_ids")
    message = parsed(decode(choice["token_ids"]))
    if request.get("include_reasoning") is False:
        message["reasoning"] = None
    made = {"index": 0, "message": message, "finish_reason": choice["finish_reason"], "logprobs": None}
    return {"id": generated["request_id"], "object": "chat.completion", "choices": [made]}


def _handler(vllm: SamplingVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer; two would wait for each other's acknowledgement

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

        def _serve(self, body: Body) -> None:
            status = 200
            try:
                if any(not 0 <= token < VOCABULARY for token in body.get("token_ids", ())):
                    raise Refuse(400, "Token id is out of vocabulary")
                answer = vllm.answer(self.command, self.path, body, self._gone)
            except Refuse as error:
                status, answer = error.status, {"error": {"message": str(error), "code": error.status}}
            except Drop:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            with suppress(ConnectionError):  # the client did not wait
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def _gone(self) -> bool:
            readable = select.select([self.connection], [], [], 0)[0]
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Tests read `requests` instead."""

    return Handler
