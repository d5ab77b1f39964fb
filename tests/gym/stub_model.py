"""A scripted policy behind an OpenAI-compatible address, in the format of vLLM's answers, token ids included.

Tokens are the bytes of the rendered conversation, so a conversation that only grows has prompts that only grow.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the policy says: a thought, then either a tool call or an answer."""

    thought: str
    tool: str | None = None
    arguments: dict[str, Any] | None = None
    answer: str | None = None


Policy = Callable[[list[Message]], Reply]


class StubModel:
    """Serves `policy` on loopback while the context is open. `requests` are the bodies that came."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.requests: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.requests.append(body)
                answer = json.dumps(stub.complete(body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass  # quiet

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "StubModel":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A chat completion."""
        reply = self.policy(body["messages"])
        message: Message = {"role": "assistant", "content": reply.answer, "reasoning_content": reply.thought}
        if reply.tool is not None:
            function = {"name": reply.tool, "arguments": json.dumps(reply.arguments)}
            message["tool_calls"] = [{"id": f"call-{len(body['messages'])}", "type": "function", "function": function}]
        generated = list(_written(message).encode())
        prompt = list("".join(map(_rendered, body["messages"])).encode())
        logprobs = [{"token": f"token_id:{t}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for t in generated]
        return {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if reply.tool else "stop",
                    "logprobs": {"content": logprobs},
                    "token_ids": generated,
                }
            ],
        }


def _rendered(message: Message) -> str:
    if message["role"] == "assistant":
        return _written(message)
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return f"<{message['role']}>{text}\n"


def _written(message: Message) -> str:
    thought = message.get("reasoning") or message.get("reasoning_content")
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = "".join(f"<call>{function['name']}{function['arguments']}" for function in functions)
    return f"{f'<think>{thought}</think>' if thought else ''}{message.get('content') or ''}{calls}\n"
