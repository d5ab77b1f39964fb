"""Runs the launcher of the Gym servers in the NeMo-Gym environment, as the stack does."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import yaml

from tests.gym.forks import Forks
from workers.environments.paths import child_environment, environment_python

MODULE = "workers.gym.serve"
START_TIMEOUT_S = 300
END_TIMEOUT_S = 60


class Launcher:
    """A running `python -m workers.gym.serve`. `urls` are the addresses that it printed.

    With `forks` it has nothing to import: the same otherwise, seconds earlier.
    """

    def __init__(self, recipe: Path, forks: Forks | None = None) -> None:
        arguments = ("--recipe", str(recipe))
        if forks is not None:
            self.process = forks.start(MODULE, *arguments, folder=recipe.parent)
        else:
            self.process = subprocess.Popen(
                [str(environment_python("gym")), "-m", MODULE, *arguments],
                env={**os.environ, **child_environment()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=recipe.parent,
            )
        assert self.process.stdout is not None
        self._printed = self.process.stdout
        self.output: list[str] = []
        self.urls: dict[str, str] = {}

    def wait_until_ready(self) -> "Launcher":
        """Read output until all servers answer."""
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        for line in self._printed:
            self.output.append(line)
            name, _, url = line.strip().partition(" ")
            if url.startswith("http://"):
                self.urls[name] = url
            if line == "ready\n":
                break
        watchdog.cancel()
        assert self.urls, "".join(self.output)
        threading.Thread(target=self._printed.read, daemon=True).start()
        return self

    def refusal(self) -> str:
        """What it says when it does not start, and ends with 1."""
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        output = self._printed.read()
        watchdog.cancel()
        assert self.process.wait(END_TIMEOUT_S) == 1, output
        assert "Traceback" not in output
        assert "ready" not in output.splitlines()
        return output

    def kill(self) -> None:
        """SIGKILL, as when the machine loses it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_TIMEOUT_S)


def write_recipe(folder: Path, gym: dict, generation: dict | None = None, storage: dict | None = None) -> Path:
    """A recipe file with a `gym` section."""
    recipe = {
        "run": {"model": "unused", "dataset": "unused"},
        "gym": gym,
        "generation": generation or {},
        "storage": storage or {},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
