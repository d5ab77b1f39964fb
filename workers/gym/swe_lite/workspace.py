"""The folder in which one rollout repairs a repository. Its path depends on the rollout alone, not on the attempt.

A second attempt at the same rollout gets a fresh folder at the same path, and shuts out the first attempt: the commands
of that one are killed, and whatever it asks for later is refused.
"""

import asyncio
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from workers.gym.swe_lite import shell

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_RUN_TEST = """
import runpy, sys
sys.path.append(".")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class WorkspaceClosed(Exception):
    """The folder is gone, or belongs to a later attempt. Becomes a 500 answer."""


class Workspace:
    """A repository on disk, and the commands that run in it."""

    def __init__(self, folder: Path, files: Mapping[str, str], max_output_chars: int) -> None:
        self.folder = folder
        self._max_output_chars = max_output_chars
        self._running: set[asyncio.Task[shell.Result]] = set()
        self._closed = False
        shutil.rmtree(folder, ignore_errors=True)
        for name, text in files.items():
            path = inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    async def bash(self, command: str, timeout_s: float) -> shell.Result:
        """Run a command of the policy."""
        return await self._run(["/bin/bash", "-c", command], timeout_s)

    async def test(self, source: str, timeout_s: float) -> shell.Result:
        """Run a Python test that the policy never saw. The repository cannot shadow Python's own library."""
        with tempfile.TemporaryDirectory() as hidden:
            path = Path(hidden) / "hidden_test.py"
            path.write_text(source)
            return await self._run([sys.executable, "-P", "-c", _RUN_TEST, str(path)], timeout_s)

    async def close(self) -> None:
        """Kill what runs, remove the folder."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _run(self, argv: list[str], timeout_s: float) -> shell.Result:
        if self._closed:
            raise WorkspaceClosed(
                f"session_lost: {self.folder} was closed, or a later attempt at the rollout owns it now"
            )
        task = asyncio.create_task(shell.run(argv, self.folder, timeout_s, self._max_output_chars))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        finally:
            task.cancel()


class Workspaces:
    """All folders of one server, each owned by the newest attempt that asked for it."""

    def __init__(self, root: Path, max_output_chars: int) -> None:
        self._root = root
        self._max_output_chars = max_output_chars
        self._open: dict[Path, Workspace] = {}
        self._opening = asyncio.Lock()

    async def open(self, rollout: str, files: Mapping[str, str]) -> Workspace:
        """A fresh folder for an attempt at `rollout`."""
        name = rollout.replace("/", ".")
        if not _NAME.fullmatch(name):
            raise ValueError(f"the rollout id {rollout!r} is not a usable folder name")
        folder = self._root / name
        async with self._opening:
            older = self._open.pop(folder, None)
            if older is not None:
                await older.close()
            self._open[folder] = Workspace(folder, files, self._max_output_chars)
            return self._open[folder]

    async def close(self, workspace: Workspace) -> None:
        """Remove a folder, unless a later attempt owns it by now."""
        if self._open.get(workspace.folder) is workspace:
            del self._open[workspace.folder]
            await workspace.close()


def inside(folder: Path, name: str) -> Path:
    """The path of a repository file; names that lead out of the folder are refused."""
    path = folder / name
    if ".." in Path(name).parts or Path(name).is_absolute() or path == folder:
        raise ValueError(f"the repository file {name!r} is not inside the repository")
    return path
