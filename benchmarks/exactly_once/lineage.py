"""What engines did, as they wrote it down, and from it the steps that a policy consists of.

Every process adds lines to one file, each written at once, so that a kill loses none: loaded (the model given, or a
checkpoint), applied, saved, exported. The chain of an export goes back through its process to where that process
began, and through a checkpoint into the process that saved it.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

LOG = "lineage.jsonl"


class LineageGap(Exception):
    """The log does not say where a policy came from."""


@dataclass(frozen=True)
class Event:
    """`version` is the engine's after it. `folder`: of the checkpoint or export; None for the model given."""

    pid: int
    kind: Literal["loaded", "applied", "saved", "exported"]
    version: int
    folder: str | None = None
    run_id: str | None = None
    step: int | None = None
    batch_digest: str | None = None


@dataclass(frozen=True)
class Applied:
    """One step of a chain."""

    step: int
    batch_digest: str


class LineageLog:
    """Appends whole lines; the writer is the only one in its process."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: Event) -> None:
        """One line in one call, which the kernel keeps when the process is killed."""
        os.write(self._file, f"{json.dumps(asdict(event))}\n".encode())


def read_log(folder: Path) -> list[Event]:
    """All events so far, in order."""
    file = folder / LOG
    lines = file.read_text().splitlines() if file.exists() else []
    return [Event(**json.loads(line)) for line in lines]


def exported_chain(events: list[Event], run_id: str, version: int) -> list[Applied]:
    """The steps, in order, behind the newest export of a version of a run."""
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if event.kind == "exported" and event.version == version and run_id in Path(event.folder or "").parts:
            return _chain(events, index)
    raise LineageGap(f"no process exported version {version} of {run_id}")


def times_applied(events: list[Event], run_id: str) -> int:
    """Optimizer steps of a run that any process did, those that a kill made worthless included."""
    return sum(event.kind == "applied" and event.run_id == run_id for event in events)


def _chain(events: list[Event], index: int) -> list[Applied]:
    """The steps behind the state of the process of `events[index]` at that moment."""
    steps: list[Applied] = []
    pid = events[index].pid
    for at in range(index, -1, -1):
        event = events[at]
        if event.pid != pid:
            continue
        if event.kind == "applied":
            assert event.step is not None
            assert event.batch_digest is not None
            steps.append(Applied(event.step, event.batch_digest))
        elif event.kind == "loaded":
            before = [] if event.folder is None else _chain(events, _saved(events, at))
            return [*before, *reversed(steps)]
    raise LineageGap(f"process {pid} never wrote what it loaded")


def _saved(events: list[Event], loaded: int) -> int:
    """Where the checkpoint was saved that an event loaded."""
    folder = events[loaded].folder
    for at in range(loaded - 1, -1, -1):
        if events[at].kind == "saved" and events[at].folder == folder:
            return at
    raise LineageGap(f"no process wrote that it saved {folder}")
