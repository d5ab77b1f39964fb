"""A vLLM server without a model: the routes of a refit, the label and digest, and the two traps of the real one.

Trap 1: an update while a request runs and generation is not paused never answers. Trap 2: after a failed update the
model is gone; the next generation kills the engine, a later good update brings it back.
"""

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse


class Refused(Exception):
    """The server answers 500."""


@dataclass
class FakeVllm:
    """State and behaviour; `events` is shared by the servers of a test and says what happened in which order. `bodies`
    are those of the server's own events."""

    name: str = "vllm"
    events: list[str] = field(default_factory=list[str])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    label: str = "default"
    digest: str | None = None
    paused: bool = False
    active: bool = False
    model_gone: bool = False
    dead: bool = False
    running_requests: int = 0
    world_size: int = 1
    blind: bool = False
    fail_next_update: bool = False
    fails_updates: bool = False  # every one
    lies: bool = False  # says after a load that it serves what it served before
    hangs: bool = False  # takes requests and never answers
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    stopped: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    _received: str | None = None

    def pauses(self) -> list[str]:
        """The modes in which it was paused, in order."""
        return [event.split()[2] for event in self.events if event.startswith(f"{self.name} pause ")]

    def restart(self) -> None:
        """What a supervisor does with a server that died."""
        self.label, self.digest, self.process = "default", None, uuid.uuid4().hex
        self.paused = self.active = self.model_gone = self.dead = False

    def generate(self) -> str:
        """The label under which a request was answered."""
        if self.model_gone:
            self.dead = True
        if self.dead:
            raise Refused("EngineDeadError")
        return self.label

    def answer(self, method: str, path: str, body: dict[str, Any], mode: str = "") -> dict[str, Any]:
        """One request."""
        if self.hangs:
            self.stopped.wait()
        if self.dead:
            raise Refused("EngineDeadError")
        match method, path:
            case "GET", "/health":
                return {}
            case "GET", "/get_world_size":
                return {"world_size": self.world_size}
            case "GET", "/weight_info":
                return {"weight_version": self.label}
            case "GET", "/is_paused":
                return {"is_paused": self.paused}
            case "POST", "/collective_rpc":
                return {"results": [self._call(body["method"], body["args"])]}
            case "POST", _:
                self.events.append(f"{self.name} {path.removeprefix('/')}" + (f" {mode}" if mode else ""))
                self.bodies.append(body)
                self._change(path, body)
                return {}
        raise Refused(f"no route {method} {path}")

    def _call(self, method: str, args: list[str]) -> dict[str, Any]:
        if method == "served_weights":
            return {"process": self.process, "digest": self.digest}
        if method == "problem_with_weights":
            visible = not self.blind and any(Path(args[0]).glob("*.safetensors"))
            return {"problem": None if visible else f"FileNotFoundError: {args[0]} holds no .safetensors file"}
        if method == "abandon_weight_update":
            was_active, self.active = self.active, False
            return {"abandoned": was_active}
        raise Refused(f"no method {method}")

    def _change(self, path: str, body: dict[str, Any]) -> None:
        match path:
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/start_weight_update":
                if self.active:
                    raise Refused("start_weight_update called while a weight update is already active")
                self.active = self.model_gone = True
                self.digest = self._received = None
            case "/update_weights":
                self._update(body["update_info"])
            case "/finish_weight_update":
                if self._received is None:
                    raise Refused("finish without update")
                if not self.lies:
                    self.digest, self.label = self._received, body["weight_version"]
                self.active = self.model_gone = False
            case _:
                pass

    def _update(self, info: dict[str, str]) -> None:
        if self.running_requests and not self.paused:
            self.stopped.wait()  # trap 1
        if not self.active:
            raise Refused("start_weight_update must be called before update_weights.")
        fails = self.fails_updates or self.fail_next_update
        if fails or ("path" in info and not any(Path(info["path"]).glob("*.safetensors"))):
            self.fail_next_update = self.active = False
            raise Refused(f"{info.get('path')} holds no .safetensors file that this server can see")
        self._received = info["digest"]


@contextmanager
def serving(fake: FakeVllm) -> Iterator[FakeVllm]:
    """Serve a fake on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def _serve(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length", "0")))
            try:
                asked = urlparse(self.path)
                mode = parse_qs(asked.query).get("mode", [""])[0]
                status, answer = 200, fake.answer(self.command, asked.path, json.loads(content or b"{}"), mode)
            except Refused as error:
                status, answer = 500, {"error": {"message": str(error)}}
            data = json.dumps(answer).encode()
            with suppress(BrokenPipeError):  # the client did not wait
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Tests read `events` instead."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        fake.stopped.set()
        server.shutdown()
        server.server_close()
