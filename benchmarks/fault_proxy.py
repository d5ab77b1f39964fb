"""A proxy in front of vLLM that breaks one chosen generation: it answers 500, or holds the request.

Everything else passes unchanged, so the policy that samples is the real one.
"""

import threading
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

GENERATE = "/inference/v1/generate"
UPSTREAM_TIMEOUT_S = 120.0
HOLD_TIMEOUT_S = 120.0
Fault = Literal["fail", "hold"]


class FaultProxy:
    """`generations` counts the generations that vLLM answered. `reached` is set when the armed fault is met."""

    def __init__(self, upstream: str) -> None:
        self.generations = 0
        self.reached = threading.Event()
        self._upstream = upstream.rstrip("/")
        self._fault: Fault | None = None
        self._at = 0
        self._asked = 0
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def arm(self, fault: Fault, generation: int) -> None:
        """Break the generation of this number (from 1, counted from now) and every later one, until disarmed."""
        with self._lock:
            self._fault, self._at, self._asked = fault, generation, 0
            self.reached.clear()
            self._released = threading.Event()

    def disarm(self) -> None:
        """Let everything pass; what is held is let go without an answer."""
        with self._lock:
            self._fault = None
            self._released.set()

    def meet(self) -> Fault | None:
        """The fault that the next generation meets."""
        with self._lock:
            self._asked += 1
            fault = self._fault if self._asked >= self._at else None
            released = self._released
        if fault is not None:
            self.reached.set()
        if fault == "hold":
            released.wait(HOLD_TIMEOUT_S)
        return fault

    def forward(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Ask vLLM; its status and answer."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self._upstream + path, data=body, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=UPSTREAM_TIMEOUT_S) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        if path == GENERATE and status == 200:
            with self._lock:
                self.generations += 1
        return status, content


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(*proxy.forward("GET", self.path, None))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            fault = proxy.meet() if self.path == GENERATE else None
            if fault == "fail":
                self._answer(500, b'{"error": {"message": "broken on purpose", "code": 500}}')
            elif fault == "hold":
                self.close_connection = True
            else:
                self._answer(*proxy.forward("POST", self.path, body))

        def _answer(self, status: int, content: bytes) -> None:
            with suppress(ConnectionError):  # the client was killed
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass  # quiet

    return Handler
