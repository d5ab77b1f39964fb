"""A generation endpoint that can be refitted: vLLM's routes for that, with the weights' files really read.

It generates nothing. `on_load` is called with the folder while weights are being loaded.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from activities.generation.weights import weights_digest

Body = dict[str, Any]


class Endpoint:
    """Serves on loopback while the context is open. `digest` is that of the files it loaded last."""

    def __init__(self) -> None:
        self.on_load: Callable[[Path], None] | None = None
        self.label, self.digest = "default", ""
        self._paused = False
        self._loaded: str | None = None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Body) -> Body | None:
        """One request; None for a route that it does not have."""
        match path.partition("?")[0]:
            case "/health":
                return {}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/is_paused":
                return {"is_paused": self._paused}
            case "/get_world_size":
                return {"world_size": 1}
            case "/pause" | "/resume" as asked:
                self._paused = asked == "/pause"
                return {}
            case "/collective_rpc":
                return {"results": [{"process": "endpoint", "digest": self.digest or None, "problem": None}]}
            case "/update_weights":
                folder = Path(body["update_info"]["path"])
                self._loaded = weights_digest(folder)
                if self.on_load is not None:
                    self.on_load(folder)
                return {}
            case "/finish_weight_update":
                if self._loaded is None:
                    return None
                self.label, self.digest, self._loaded = body["weight_version"], self._loaded, None
                return {}
            case "/init_weight_transfer_engine" | "/start_weight_update" | "/reset_prefix_cache":
                return {}
        return None


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer; two would wait for each other's acknowledgement

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            self._serve(json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"))

        def _serve(self, body: Body) -> None:
            answer = endpoint.answer(self.path, body)
            data = json.dumps(answer or {}).encode()
            with suppress(ConnectionError):  # the client did not wait
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Quiet."""

    return Handler
