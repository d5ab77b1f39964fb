"""Where the trainer is killed, and how launcher and benchmark agree on it: two files in the scratch folder.

The benchmark writes the aim. Whoever hits it takes it away first, so that one aim kills once, and leaves a mark.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

PointName = Literal[
    "before the batch is loaded",
    "in a micro-batch",
    "before the step is recorded",
    "after the step is recorded",
    "while a checkpoint is saved",
    "while weights are exported",
    "during the refit",
]
POINTS: tuple[PointName, ...] = get_args(PointName)
STEPS, KILLED_STEP = 6, 3
AIM, MARK = "aim.json", "struck.json"


@dataclass(frozen=True)
class Aim:
    """One kill: at a point of one step of one run, whose batch has this digest."""

    point: PointName
    run_id: str
    step: int
    batch_digest: str

    @property
    def version(self) -> int:
        """The policy version that the step makes."""
        return self.step + 1

    def is_folder(self, path: Path, kind: str, name: str) -> bool:
        """Whether a path is the step's checkpoint (or weights) in the run's folder of that kind."""
        parts = path.parts
        return self.run_id in parts and kind in parts and path.name.startswith(f"{name}-{self.version}")


def final_state(folder: Path, run_id: str) -> Path:
    """Where the launcher saves the trainer's whole state at the last version, beside the product's own checkpoints."""
    return folder / "final" / run_id


@dataclass(frozen=True)
class Struck:
    """A kill that was done, and when (seconds since the epoch)."""

    point: str
    pid: int
    at: float


def take_aim(folder: Path, aim: Aim) -> None:
    """From now on the first process that comes to the point is killed."""
    (folder / MARK).unlink(missing_ok=True)
    draft = folder / f"{AIM}.draft"
    draft.write_text(json.dumps(asdict(aim)))
    draft.rename(folder / AIM)


def aimed(folder: Path) -> Aim | None:
    """The aim, while it was not hit."""
    try:
        return Aim(**json.loads((folder / AIM).read_text()))
    except FileNotFoundError:
        return None


def hit(folder: Path, pid: int) -> bool:
    """Take the aim away; whether it was there. The process `pid` must be killed then."""
    taken = folder / f"{AIM}.{os.getpid()}"
    try:
        (folder / AIM).rename(taken)
    except FileNotFoundError:
        return False
    struck = Struck(json.loads(taken.read_text())["point"], pid, time.time())
    draft = folder / f"{MARK}.draft"
    draft.write_text(json.dumps(asdict(struck)))
    draft.rename(folder / MARK)
    return True


def struck(folder: Path) -> Struck | None:
    """The mark of the last kill since an aim was taken."""
    try:
        return Struck(**json.loads((folder / MARK).read_text()))
    except FileNotFoundError:
        return None
