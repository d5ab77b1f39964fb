"""One log file for each service: appended to, a line for each start, bounded by moving a large one aside."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 50 * 2**20
TAIL_BYTES = 256 * 2**10
FOLLOW_PAUSE_S = 0.3


def open_log(path: Path, title: str, max_bytes: int = MAX_BYTES) -> BinaryIO:
    """Open for appending; a file over `max_bytes` becomes `NAME.log.1` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > max_bytes:
        path.replace(path.with_name(path.name + ".1"))
    file = path.open("ab", buffering=0)
    file.write(f"--- {datetime.now(UTC).isoformat(timespec='seconds')} {title}\n".encode())
    return file


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; empty when there is none."""
    if lines == 0 or not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(deque(text.splitlines(), maxlen=lines))


async def follow(path: Path) -> AsyncIterator[str]:
    """What is appended from now on, also after the file was moved aside."""
    position = path.stat().st_size if path.exists() else 0
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < position:
            position = 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                data = file.read()
            position += len(data)
            yield data.decode(errors="replace")
        await asyncio.sleep(FOLLOW_PAUSE_S)
