"""As much HTTP/1.1 as a proxy between NeMo-Gym's servers needs: requests with a length, answers with one."""

import asyncio
from dataclasses import dataclass

_HOP_BY_HOP = {"connection", "keep-alive", "host", "transfer-encoding", "content-length", "content-encoding"}


@dataclass(frozen=True)
class HttpRequest:
    """One request; `headers` without those of the connection."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


@dataclass(frozen=True)
class HttpAnswer:
    """One answer; `headers` without those of the connection."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def to_bytes(self) -> bytes:
        """As it goes over the wire."""
        lines = [f"HTTP/1.1 {self.status} Answer", *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, f"content-length: {len(self.body)}", "", ""]).encode("latin-1") + self.body


def end_to_end(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that a proxy passes on."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]


async def read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    """The next request of a connection, or None at its end."""
    try:
        return await _read(reader)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _read(reader: asyncio.StreamReader) -> HttpRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return HttpRequest(method, path, end_to_end(headers), await reader.readexactly(length))
