"""Install the three environments (`python3 workers/environments/install.py`); needs nothing but Python's library.

What is installed is exactly a lock file, at one place: a stamp in each environment says which, and is written last.
An environment without the right stamp is made again from nothing, so an interrupted install is never used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = Path(__file__).resolve().parent
OLDEST_PYTHON = (3, 11)
TESTED_PYTHON = (3, 11)
GIB = 2**30
SIZES_GIB = {"onbelay": 2.5, "vllm": 4.5, "gym": 2.0}
PIP_OPTIONS = {"gym": ["--ignore-requires-python"]}  # nemo-gym asks for 3.13.14 and runs on 3.11
IMPORTS = {
    "onbelay": [
        "temporalio.worker",
        "torch",
        "megatron.core",
        "transformers",
        "sqlalchemy.ext.asyncio",
        "alembic.command",
    ],
    "vllm": ["vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"],
    "gym": [
        "nemo_gym.server_utils",
        "responses_api_agents.simple_agent_with_compaction.app",
        "responses_api_models.vllm_model_with_compaction.app",
    ],
}
PROGRESS_PERIOD_S = 10.0
TAIL_LINES = 20


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


class CommandFailed(Exception):
    """A command of an installation failed; the message ends with its output."""


def main() -> int:
    """Exit code: 0 installed, 1 failed, 2 something is missing on this machine."""
    try:
        if os.environ.get("ONBELAY_VENVS"):
            return check_given(Path(os.environ["ONBELAY_VENVS"]))
        return install_all(ROOT / ".venvs")
    except SetupError as error:
        say(f"set-up stops: {error}")
        return 2
    except CommandFailed as error:
        say(f"set-up failed: {error}")
        return 1
    except KeyboardInterrupt:
        say("set-up interrupted; run it again to go on")
        return 130


def check_given(venvs: Path) -> int:
    """Environments that were made elsewhere (images): used as they are."""
    missing = [name for name in SIZES_GIB if not (venvs / name / "bin" / "python").exists()]
    if missing:
        raise SetupError(f"ONBELAY_VENVS is {venvs}, which has no environment {', '.join(missing)}.")
    return 0


def install_all(venvs: Path) -> int:
    """Bring every environment to its lock file."""
    venvs.mkdir(exist_ok=True)
    with (venvs / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        environments = [Environment(venvs, name) for name in SIZES_GIB]
        outdated = [environment for environment in environments if not environment.is_current()]
        if outdated:
            python = find_python()
            check_machine(venvs, outdated)
            started = time.monotonic()
            names = ", ".join(environment.name for environment in outdated)
            say(f"installing the environments {names} with {python} into {venvs} (some minutes, once)")
            install_side_by_side(outdated, python)
            say(f"environments installed in {time.monotonic() - started:.0f} s")
        for environment in environments:
            environment.install_project()
    return 0


class Environment:
    """One virtual environment and its lock file."""

    def __init__(self, venvs: Path, name: str) -> None:
        self.name = name
        self.folder = venvs / name
        self.python = self.folder / "bin" / "python"
        self.log = venvs / f"{name}.log"
        self.lock_file = LOCKS / f"{name}.txt"
        self.doing = "waiting"
        self.failure: str | None = None

    def is_current(self) -> bool:
        """Whether the environment is complete, of this lock file, and at this place."""
        return self.python.exists() and self._stamp("environment.json") == self._wanted()

    def install(self, python: str) -> None:
        """Make the environment from nothing."""
        if self.folder.is_symlink():
            raise SetupError(f"{self.folder} is a link; remove it, or name its folder with ONBELAY_VENVS.")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.write_bytes(b"")
        self.doing = "creating the virtual environment"
        self._run([python, "-m", "venv", str(self.folder)])
        packages = sum(1 for line in self.lock_file.read_text().splitlines() if "==" in line)
        self.doing = f"downloading and installing {packages} packages"
        options = ["--no-deps", "--no-compile", "--progress-bar", "off", *PIP_OPTIONS.get(self.name, [])]
        self._run([str(self.python), "-m", "pip", "install", *options, "-r", str(self.lock_file)])
        self.doing = "importing the packages once (checks them, and compiles what will be imported)"
        self._run([str(self.python), "-c", "import " + ", ".join(IMPORTS[self.name])])
        (self.folder / "environment.json").write_text(json.dumps(self._wanted()))

    def install_project(self) -> None:
        """Make the project importable, and its command available, in the environment."""
        pyproject = ROOT / "pyproject.toml"
        wanted = {"pyproject": hashlib.sha256(pyproject.read_bytes()).hexdigest()}
        if self._stamp("project.json") == wanted:
            return
        say(f"{self.name}: installing the project")
        self._run([str(self.python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
        (self.folder / "project.json").write_text(json.dumps(wanted))

    def _run(self, argv: list[str]) -> None:
        # PYTHONDONTWRITEBYTECODE would make every start compile thousands of files again.
        own = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONDONTWRITEBYTECODE": ""}
        with self.log.open("ab") as log:
            code = subprocess.call(
                argv,
                cwd=ROOT,
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if code != 0:
            lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            quoted = "".join(f"\n  | {line}" for line in lines)
            raise CommandFailed(f"{self.name}: `{' '.join(argv[:4])} ...` exited with {code}; log {self.log}:{quoted}")

    def _stamp(self, name: str) -> object:
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError):
            return None

    def _wanted(self) -> dict[str, str]:
        return {"lock": hashlib.sha256(self.lock_file.read_bytes()).hexdigest(), "folder": str(self.folder)}


def install_side_by_side(environments: list[Environment], python: str) -> None:
    """All at once (downloads and unpacking overlap), with a line of progress now and then."""
    started = time.monotonic()
    threads = [threading.Thread(target=_install_one, args=(environment, python)) for environment in environments]
    for thread in threads:
        thread.start()
    printed = started
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.2)
        if time.monotonic() - printed > PROGRESS_PERIOD_S:
            printed = time.monotonic()
            doing = "; ".join(f"{environment.name}: {environment.doing}" for environment in environments)
            say(f"[{printed - started:4.0f} s] {doing}")
    failures = [environment.failure for environment in environments if environment.failure]
    if failures:
        raise CommandFailed("\n".join(failures))


def _install_one(environment: Environment, python: str) -> None:
    started = time.monotonic()
    try:
        environment.install(python)
        environment.doing = "done"
        say(f"{environment.name}: installed in {time.monotonic() - started:.0f} s")
    except (SetupError, CommandFailed, OSError) as error:
        environment.doing = "failed"
        environment.failure = str(error)


def find_python() -> str:
    """The interpreter the lock files were tested with, otherwise any that is new enough."""
    candidates = [sys.executable, *(shutil.which(f"python3.{minor}") for minor in (11, 12, 13))]
    versions = {candidate: _version(candidate) for candidate in candidates if candidate}
    tested = [candidate for candidate, version in versions.items() if version == TESTED_PYTHON]
    usable = [candidate for candidate, version in versions.items() if version and version >= OLDEST_PYTHON]
    if not usable:
        raise SetupError(
            "Python 3.11 or later is needed and was not found. Install it (Debian and Ubuntu: "
            "`apt install python3.11 python3.11-venv`; macOS: `brew install python@3.11`), then run `make setup` again."
        )
    return (tested or usable)[0]


def _version(python: str) -> tuple[int, int] | None:
    """Major and minor version; None when it does not run or cannot make virtual environments."""
    if python == sys.executable:
        complete = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
        return (sys.version_info.major, sys.version_info.minor) if complete else None
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def check_machine(venvs: Path, environments: list[Environment]) -> None:
    """A compiler (PyTorch compiles kernels when asked to) and room on the disk."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        raise SetupError(
            "A C++ compiler is needed and was not found. Install one (Debian, Ubuntu: `apt install build-essential`; "
            "Fedora: `dnf install gcc-c++`; macOS: `xcode-select --install`), then run `make setup` again."
        )
    needed = sum(SIZES_GIB[environment.name] for environment in environments) * GIB
    free = shutil.disk_usage(venvs).free
    if free < needed:
        raise SetupError(
            f"{venvs} needs {needed / GIB:.1f} GiB of disk space and {free / GIB:.1f} GiB are free. "
            "Free some, or clone the repository to a larger disk."
        )


def say(text: str) -> None:
    """One line of progress."""
    print(f"onbelay setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
