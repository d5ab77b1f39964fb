"""Runs the launcher of the Gym servers in the NeMo-Gym environment, as the stack does."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import yaml

from workers.environments.paths import environment_python, repository_root

START_TIMEOUT_S = 120


class Launcher:
    """A running `python -m workers.gym.serve`. `urls` are the addresses that it printed."""

    def __init__(self, recipe: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(repository_root())}
        command = [str(environment_python("gym")), "-m", "workers.gym.serve", "--recipe", str(recipe)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=recipe.parent
        )
        self.output: list[str] = []
        self.urls: dict[str, str] = {}

    def wait_until_ready(self) -> "Launcher":
        """Read output until all servers answer."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        for line in self.process.stdout:
            self.output.append(line)
            name, _, url = line.strip().partition(" ")
            if url.startswith("http://"):
                self.urls[name] = url
            if line == "ready\n":
                break
        watchdog.cancel()
        assert self.urls, "".join(self.output)
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        return self

    def kill(self) -> None:
        """SIGKILL, as when the machine loses it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


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
