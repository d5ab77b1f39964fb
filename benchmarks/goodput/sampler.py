"""A sampling model behind vLLM's routes for exact tokens: it uses the tool until nothing is left, then answers.

    python -m benchmarks.goodput.sampler --port PORT --seed SEED --token-ms MS

What it thinks in between is sampled: length and text depend on the request, the seed and how often the same prompt was
asked before, so two samples of one prompt differ. A generation takes `token-ms` per token, without using the processor.
GET /sampled says how many tokens were sampled so far, for whomever.
"""

import argparse
import hashlib
import json
import random
import re
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.goodput.language import END_OF_TURN, VOCABULARY, decode, encode, parsed, rendered, spoken

Body = dict[str, Any]


TOOL = "use"
MAX_MODEL_LEN = 16_384
VERSION = "policy-0"
THOUGHT_TOKENS = (8, 64)
_LEFT = re.compile(r'\{"left": ?(\d+)\}')


class Refuse(Exception):
    """The server answers with an error instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Sampler:
    """The policy and its count."""

    def __init__(self, seed: int, token_s: float) -> None:
        self._seed = seed
        self._token_s = token_s
        self._asked: Counter[bytes] = Counter()
        self._sampled = 0
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: Body) -> Body:
        """One request."""
        match method, path:
            case "GET", "/health":
                return {}
            case "GET", "/v1/models":
                return {"data": [{"id": "policy", "root": "policy", "max_model_len": MAX_MODEL_LEN}]}
            case "GET", "/weight_info":
                return {"weight_version": VERSION}
            case "GET", "/is_paused":
                return {"is_paused": False}
            case "GET", "/sampled":
                return {"tokens": self._sampled}
            case "POST", "/collective_rpc":
                return {"results": [{"process": "sampler", "digest": "d" * 64}]}
            case "POST", "/v1/chat/completions/render":
                return _render(body)
            case "POST", "/inference/v1/generate":
                return self._generate(body)
            case "POST", "/v1/chat/completions/derender":
                return _derender(body)
            case "POST", "/tokenize":
                tokens = _prompt(body)
                return {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens}
        raise Refuse(404, f"no route {method} {path}")

    def _generate(self, body: Body) -> Body:
        prompt, sampling = body["token_ids"], body["sampling_params"]
        if any(not 0 <= token < VOCABULARY for token in prompt):
            raise Refuse(400, "Token id is out of vocabulary")
        limit = min(sampling["max_tokens"], MAX_MODEL_LEN - len(prompt))
        if limit <= 0:
            raise Refuse(400, f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length.")
        if sampling.get("allowed_token_ids"):  # the check of the chat template: it may say one token only
            return _generated(body, _until_end(sampling["allowed_token_ids"] * limit, limit), random.Random(0))
        draw = self._draw(prompt)
        sampled = _until_end(encode(f"{_said(decode(prompt), draw)}<|end|>"), limit)
        time.sleep(self._token_s * len(sampled))
        with self._lock:
            self._sampled += len(sampled)
        return _generated(body, sampled, draw)

    def _draw(self, prompt: list[int]) -> random.Random:
        key = hashlib.sha256(json.dumps(prompt).encode()).digest()
        with self._lock:
            asked = self._asked[key]
            self._asked[key] += 1
        return random.Random(f"{self._seed}/{key.hex()}/{asked}")


def _said(prompt: str, draw: random.Random) -> str:
    """The policy's turn."""
    left = _LEFT.findall(prompt)
    thought = f"{draw.getrandbits(4 * THOUGHT_TOKENS[1]):x}"[: draw.randint(*THOUGHT_TOKENS)]
    return spoken(thought, "done", None) if left and left[-1] == "0" else spoken(thought, "", TOOL)


def _until_end(tokens: list[int], limit: int) -> list[int]:
    end = tokens.index(END_OF_TURN) + 1 if END_OF_TURN in tokens else len(tokens)
    return tokens[: min(end, limit)]


def _generated(body: Body, sampled: list[int], draw: random.Random) -> Body:
    prompt = body["token_ids"]
    entries = [{"token_id": token, "logprob": -draw.uniform(0.01, 3.0), "rank": 1} for token in sampled]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    choice = {
        "index": 0,
        "finish_reason": "stop" if sampled[-1] == END_OF_TURN else "length",
        "stop_reason": None,
        "token_ids": sampled,
        "weight_versions": [{"version": VERSION, "start": 0, "end": len(sampled)}],
        "logprobs": {"content": entries},
    }
    return {
        "request_id": f"generate-tokens-{body.get('request_id', secrets.token_hex(8))}",
        "model": body.get("model"),
        "created": int(time.time()),
        "usage": usage | {"total_tokens": len(prompt) + len(sampled)},
        "prompt_token_ids": prompt,
        "output_mode": "tokens",
        "choices": [choice],
    }


def _prompt(body: Body) -> list[int]:
    return encode(rendered(body["messages"], body.get("tools"), prompt=body.get("add_generation_prompt", True)))


def _render(body: Body) -> Body:
    prompt = _prompt(body)
    wanted = body.get("max_completion_tokens") or body.get("max_tokens") or MAX_MODEL_LEN
    return {
        "request_id": f"chatcmpl-{secrets.token_hex(8)}",
        "token_ids": prompt,
        "features": None,
        "sampling_params": {
            "temperature": body.get("temperature", 1.0),
            "stop": body.get("stop") or [],
            "stop_token_ids": body.get("stop_token_ids") or [],
            "max_tokens": min(wanted, MAX_MODEL_LEN - len(prompt)),
            "logprobs": body.get("top_logprobs", 0) if body.get("logprobs") else None,
        },
        "model": body.get("model"),
        "stream": False,
    }


def _derender(body: Body) -> Body:
    generated = body["generate_response"]
    choice = generated["choices"][0]
    message = parsed(decode(choice["token_ids"]))
    made = {"index": 0, "message": message, "finish_reason": choice["finish_reason"], "logprobs": None}
    return {"id": generated["request_id"], "object": "chat.completion", "choices": [made]}


def _handler(sampler: Sampler) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer; two would wait for each other's acknowledgement

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

        def _serve(self, body: Body) -> None:
            status = 200
            try:
                answer = sampler.answer(self.command, self.path, body)
            except Refuse as error:
                status, answer = error.status, {"error": {"message": str(error), "code": error.status}}
            data = json.dumps(answer).encode()
            with suppress(ConnectionError):  # the client did not wait
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Quiet."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serve on loopback until the process is ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput.sampler", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--token-ms", type=float, required=True)
    arguments = parser.parse_args()
    sampler = Sampler(arguments.seed, arguments.token_ms / 1e3)
    _Server(("127.0.0.1", arguments.port), _handler(sampler)).serve_forever()


if __name__ == "__main__":
    main()
