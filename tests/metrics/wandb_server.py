"""A W&B server of one project: what the real client asks of it to make a run, to resume it and to send its history."""

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """What it was sent. `history` has the lines of each run by their offset: a line that is sent again replaces; `told`
    is what runs were made with."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        self.unknown: set[str] = set()
        self.told: dict[str, Any] = {}
        self.url = ""

    def steps(self, run_id: str) -> list[int]:
        """The steps of a run in the order of its history."""
        return [line["_step"] for _, line in sorted(self.history.get(run_id, {}).items())]

    def values(self, run_id: str, step: int) -> dict[str, Any]:
        """What the history of a run has of a step."""
        (values,) = [line for line in self.history[run_id].values() if line["_step"] == step]
        return values

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of an answer."""
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "RunResumeStatus":
            return {"model": {**PROJECT, "bucket": self._bucket(variables["name"])}}
        if operation == "UpsertBucket":
            name = variables["name"]
            is_new = name not in self.history
            self.history.setdefault(name, {})
            self.told |= {key: value for key, value in variables.items() if value is not None}
            bucket = {**(self._bucket(name) or {}), "project": PROJECT, "sweepName": None, "description": None}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        self.unknown.add(operation)
        return {}

    def stream(self, run_id: str, files: dict[str, Any]) -> None:
        """Lines of a run's files."""
        part = files.get("wandb-history.jsonl", {"offset": 0, "content": []})
        for place, line in enumerate(part["content"], start=part["offset"]):
            self.history[run_id][place] = json.loads(line)

    def _bucket(self, name: str) -> dict[str, Any] | None:
        if name not in self.history:
            return None
        lines = [json.dumps(line) for _, line in sorted(self.history[name].items())]
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(lines[-1:]),
            "eventsTail": "[]",
            "config": "{}",
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": {"3": [13]}}),
        }


PROJECT = {"id": "project", "name": "climbing", "entity": {"id": "entity", "name": "team"}}


@contextmanager
def serving(server: WandbServer) -> Iterator[WandbServer]:
    """Serve on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Nothing is printed."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked = json.loads(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            streamed = re.fullmatch(r"/files/[^/]*/[^/]*/([^/]+)/file_stream", self.path)
            if streamed:
                server.stream(streamed[1], asked.get("files") or {})
            self._answer(
                {} if streamed else {"data": server.graphql(asked["operationName"], asked.get("variables") or {})}
            )

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self._answer({})

        def _answer(self, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()
