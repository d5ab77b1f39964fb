"""What rank 0 tells every rank to do, and what a rank answers."""

from dataclasses import dataclass, field
from pathlib import Path

from configs.grpo import GrpoConfig
from configs.training import TrainingConfig


@dataclass(frozen=True)
class Settings:
    """All that makes the engine of a run."""

    training: TrainingConfig
    grpo: GrpoConfig
    temperature: float
    model_dir: Path


@dataclass(frozen=True)
class Load:
    """Become the run's version 0, or the version of a checkpoint."""

    settings: Settings
    checkpoint: Path | None


@dataclass(frozen=True)
class Train:
    """Apply one optimizer step with a batch in its byte form."""

    batch: bytes = field(repr=False)


@dataclass(frozen=True)
class Export:
    """Write the weights in Hugging Face format."""

    folder: Path


@dataclass(frozen=True)
class Save:
    """Write a checkpoint."""

    folder: Path


@dataclass(frozen=True)
class Stop:
    """Leave the loop; the process ends."""


Command = Load | Train | Export | Save | Stop


@dataclass(frozen=True)
class Outcome:
    """A rank's answer; `error` is a line, with a traceback unless it was refused.

    `refused`: the same input would fail again. `cancelled`: nobody waited for it any more. `kept`: a step that was not
    applied left the weights of the version before. `stuck`: the rank did not answer.
    """

    rank: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error: str | None = None
    refused: bool = False
    cancelled: bool = False
    kept: bool = False
    stuck: bool = False
