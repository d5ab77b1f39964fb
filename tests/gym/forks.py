"""The other end of `tests.gym.forking`: processes of NeMo-Gym's environment that have nothing left to import."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from workers.environments.paths import child_environment, environment_python

PATIENCE_S = 300.0


class Forked:
    """A process, as far as a `subprocess.Popen` that merges both outputs is one."""

    def __init__(self, stdout: TextIO, told: socket.socket) -> None:
        self.stdout = stdout
        self._told = told
        told.settimeout(PATIENCE_S)
        self._lines = told.makefile()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Nothing happens when it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative is a signal. TimeoutError if it does not end."""
        if self.returncode is None:
            self._told.settimeout(timeout)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._told.close()
        return self.returncode


class Forks:
    """Starts them, until it is closed."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [str(environment_python("gym")), "-m", "tests.gym.forking", str(theirs.fileno())],
                env={**os.environ, **child_environment()},
                pass_fds=[theirs.fileno()],
            )

    def start(self, module: str, *arguments: str, folder: Path, variables: Mapping[str, str] | None = None) -> Forked:
        """`python -m module arguments` in a folder."""
        asked = {
            "module": module,
            "arguments": arguments,
            "variables": dict(variables or {}),
            "folder": str(folder),
        }
        reading, writing = os.pipe()
        told, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [json.dumps(asked).encode()], [writing, theirs.fileno()])
        os.close(writing)
        return Forked(os.fdopen(reading), told)

    def output(self, module: str, *arguments: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
        """What it prints until it ends, which is well."""
        process = self.start(module, *arguments, folder=folder, variables=variables)
        with process.stdout as printed:
            output = printed.read()
        assert process.wait(PATIENCE_S) == 0, output
        return output

    def close(self) -> None:
        """Those that run go on."""
        self._control.close()
        self._process.wait()
