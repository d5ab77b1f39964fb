"""Runs one command to its end: with a deadline, bounded output and files, and nothing of it left running after.

Output that differs between two runs of the same command for no reason (durations, addresses) is made equal, because an
attempt that is tried again is answered from the record only while its tool outputs are the same.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TIMEOUT_RETURNCODE = 124
FILE_SIZE_KIB = 64 * 1024
MEMORY_KIB = 4 * 1024 * 1024
_LIMITED = 'ulimit -f "$1" -v "$2"; shift 2; exec "$@"'
_UNSTABLE = (
    (re.compile(r"\b0x[0-9a-f]{6,16}\b"), "0x0"),
    (re.compile(r"\bin \d+\.\d+ ?s(econds)?\b"), "in 0.0s"),
)


@dataclass(frozen=True)
class Result:
    """How a command ended. A command that was stopped at its deadline has the return code 124."""

    returncode: int
    output: str


async def run(argv: Sequence[str], folder: Path, timeout_s: float, max_output_chars: int) -> Result:
    """Run `argv` in `folder`. Its whole process group is killed when it ends, at the deadline, and on cancellation."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", _LIMITED, "bash", str(FILE_SIZE_KIB), str(MEMORY_KIB), *argv),
            cwd=folder,
            env=_environment(folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        returncode = TIMEOUT_RETURNCODE
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    returncode = await process.wait()
        finally:
            _kill_group(process.pid)
            await process.wait()
        text = _shortened(output, max_output_chars)
    if returncode == TIMEOUT_RETURNCODE:
        text += f"\n[stopped after {timeout_s:g} s]"
    return Result(returncode, text)


def stable(text: str) -> str:
    """The text without durations and memory addresses."""
    for pattern, replacement in _UNSTABLE:
        text = pattern.sub(replacement, text)
    return text


def _shortened(output: IO[bytes], max_chars: int) -> str:
    """The first and the last part of a file, `max_chars` in all."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= max_chars:
        return stable(output.read().decode(errors="replace"))
    head = output.read(max_chars // 2).decode(errors="replace")
    output.seek(-(max_chars - max_chars // 2), os.SEEK_END)
    tail = output.read().decode(errors="replace")
    return stable(f"{head}\n[{size - max_chars} bytes left out]\n{tail}")


def _environment(folder: Path) -> dict[str, str]:
    """The same for every run; nothing of the server's own environment, which may hold secrets."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
