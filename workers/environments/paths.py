"""Where the three environments are: `$ONBELAY_VENVS`, or `.venvs` beside the code, one folder each.

The interpreter of an environment is named only when it exists; otherwise the error says how to make it.
"""

import os
from pathlib import Path
from typing import Literal

from workers.stack.errors import StackError

EnvironmentName = Literal["onbelay", "vllm", "gym"]


class EnvironmentMissing(StackError):
    """An environment has not been installed."""


def repository_root() -> Path:
    """The folder that holds `configs`, `workers`, ... and the Makefile."""
    return Path(__file__).resolve().parents[2]


def environments_dir() -> Path:
    """The folder of the environments."""
    override = os.environ.get("ONBELAY_VENVS")
    return Path(override).absolute() if override else repository_root() / ".venvs"


def environment_python(name: EnvironmentName) -> Path:
    """The interpreter of an environment."""
    python = environments_dir() / name / "bin" / "python"
    if not python.exists():
        raise EnvironmentMissing(
            f"The {name} environment is not installed ({python} does not exist): run `make setup` in "
            f"{repository_root()}, or set ONBELAY_VENVS to the folder that holds the environments."
        )
    return python


def child_environment() -> dict[str, str]:
    """What a process of any environment gets: the project is importable, also where it was not installed.

    Bytecode is cached even where PYTHONDONTWRITEBYTECODE is set: without it every start compiles thousands of files.
    """
    search_path = os.pathsep.join(filter(None, [str(repository_root()), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": search_path, "PYTHONDONTWRITEBYTECODE": ""}
