"""What the supervisor writes down at every change: `state.json` in the state folder, replaced atomically.

Enough to show the status, and to find and stop by name what a killed supervisor left running.
"""

import os
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from workers.stack.processes import ProcessId

ServiceState = Literal[
    "waiting", "starting", "ready", "restarting", "failed", "stopping", "stopped", "done", "leftover"
]
Phase = Literal["starting", "up", "failed", "stopping", "down"]


class ServiceStatus(BaseModel):
    """One service. `restarts` counts starts after the first; `resident_bytes` is filled in by readers."""

    model_config = ConfigDict(extra="forbid")

    name: str
    state: ServiceState = "waiting"
    process: ProcessId | None = None
    since: datetime
    restarts: int = 0
    failures_in_a_row: int = 0
    reason: str | None = None
    address: str | None = None
    log: Path | None = None
    stop_signal: int
    resident_bytes: int | None = None


class StackState(BaseModel):
    """The supervisor and its services, in order of start."""

    model_config = ConfigDict(extra="forbid")

    phase: Phase
    supervisor: ProcessId
    reason: str | None = None
    services: list[ServiceStatus]

    def save(self, path: Path) -> None:
        """Replace the file."""
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        scratch.write_text(self.model_dump_json(indent=1))
        scratch.replace(path)

    @classmethod
    def load(cls, path: Path) -> "StackState | None":
        """What was saved last; None when there is nothing readable."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
