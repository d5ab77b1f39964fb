"""A NeMo-Gym agent server in small: real sockets, scripted answers, and a memory of what it was asked."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 120.0


@dataclass
class Exchange:
    """One request to the agent, and the means to answer it."""

    body: dict[str, Any]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    dropped: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, status: int, content: Any) -> None:
        """Send a whole response; bytes as they are, anything else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        await self.send_head(status, len(data))
        await self.send(data)

    async def send_head(self, status: int, size_bytes: int) -> None:
        """Send the status line and headers of a response."""
        head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {size_bytes}\r\n\r\n"
        await self.send(head.encode())

    async def send(self, data: bytes) -> None:
        """Send bytes of the response."""
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()

    async def wait_for_drop(self) -> None:
        """Answer nothing until the client closes its connection."""
        while await self.reader.read(1024):
            pass
        self.dropped.set()


Reply = Callable[[Exchange], Awaitable[None]]


class AgentServer:
    """One agent on a free loopback port; every request is answered by `reply`."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.exchanges: list[Exchange] = []
        self.connections = 0
        self._asked = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> "AgentServer":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def asked(self, times: int) -> Exchange:
        """The `times`-th request (from 1), once it has arrived."""
        async with asyncio.timeout(PATIENCE_S), self._asked:
            await self._asked.wait_for(lambda: len(self.exchanges) >= times)
        return self.exchanges[times - 1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                    assert head.startswith("post /run ")
                    size_bytes = int(head.split("content-length:")[1].split()[0])
                    exchange = Exchange(json.loads(await reader.readexactly(size_bytes)), reader, writer)
                    async with self._asked:
                        self.exchanges.append(exchange)
                        self._asked.notify_all()
                    await self.reply(exchange)
        finally:
            writer.close()


def answering(status: int, content: Any) -> Reply:
    """Give the same answer to every request."""

    async def reply(exchange: Exchange) -> None:
        await exchange.answer(status, content)

    return reply


async def silence(exchange: Exchange) -> None:
    """Never answer."""
    await exchange.wait_for_drop()
