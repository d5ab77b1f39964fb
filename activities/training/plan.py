"""How the trainer reaches a policy version, decided from records alone: every step is applied exactly once.

Version v is the model given, plus the stored batches 0..v-1 in order. The engine may be anywhere: fresh, of another
run, behind, or ahead of the ledger because the record of its last step was not written. The plan starts from the newest
state that is not past the target and replays stored batches from there. Nothing here touches anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from activities.training.errors import TrainingError


class StepRefused(TrainingError):
    """A step that contradicts what is recorded: repeating it cannot help."""


@dataclass(frozen=True)
class Ledgered:
    """Digests of the step's stored batch and of the one it was applied with; the newest applied step of the run."""

    stored_digest: str | None
    applied_digest: str | None
    last_applied: int | None


@dataclass(frozen=True)
class EngineAt:
    """The engine holds `version` of the run; `trained_digest` is the batch of its last step, if it trained here."""

    version: int
    trained_digest: str | None = None


@dataclass(frozen=True)
class KeepEngine:
    """Go on from what the engine holds."""


@dataclass(frozen=True)
class LoadModel:
    """Start from version 0."""


@dataclass(frozen=True)
class LoadCheckpoint:
    """Start from a checkpoint."""

    version: int


@dataclass(frozen=True)
class Route:
    """Start somewhere, then apply the stored batches of `replay` again, in order."""

    start: KeepEngine | LoadModel | LoadCheckpoint
    replay: tuple[int, ...]


@dataclass(frozen=True)
class ReturnApplied:
    """The step is recorded with this batch: its result is the recorded one."""


@dataclass(frozen=True)
class RecordTrained:
    """The engine trained this batch already; only the record is missing."""


def plan_version(version: int, last_applied: int | None, engine: EngineAt | None, checkpoints: Iterable[int]) -> Route:
    """The route to a version whose steps are all applied."""
    reached = 0 if last_applied is None else last_applied + 1
    if version > reached:
        raise StepRefused(f"Policy version {version} does not exist yet: the steps applied so far lead to {reached}.")
    return _route(version, engine, checkpoints)


def plan_step(
    step: int, digest: str, ledger: Ledgered, engine: EngineAt | None, checkpoints: Iterable[int]
) -> ReturnApplied | RecordTrained | Route:
    """What to do when asked to apply `step` with the batch `digest`; a Route is followed by training that batch."""
    if ledger.applied_digest is not None:
        if ledger.applied_digest != digest:
            raise StepRefused(
                f"Step {step} was applied with batch {ledger.applied_digest[:12]}; batch {digest[:12]} is refused, "
                "because a step is applied once."
            )
        return ReturnApplied()
    if ledger.stored_digest != digest:
        stored = "none" if ledger.stored_digest is None else ledger.stored_digest[:12]
        raise StepRefused(f"Step {step} has the stored batch {stored}; batch {digest[:12]} is refused.")
    next_step = 0 if ledger.last_applied is None else ledger.last_applied + 1
    if step != next_step:
        raise StepRefused(f"Step {step} cannot be applied: the next step of the run is {next_step}.")
    if engine == EngineAt(step + 1, digest):
        return RecordTrained()
    return _route(step, engine, checkpoints)


def checkpoint_due(version: int, checkpoints: Iterable[int], save_period: int) -> bool:
    """Whether the newest checkpoint (or version 0) is `save_period` steps behind. One that failed is made up for."""
    return version - max((saved for saved in checkpoints if saved <= version), default=0) >= save_period


def _route(target: int, engine: EngineAt | None, checkpoints: Iterable[int]) -> Route:
    saved = max((version for version in checkpoints if 0 < version <= target), default=0)
    if engine is not None and saved <= engine.version <= target:
        return Route(KeepEngine(), tuple(range(engine.version, target)))
    return Route(LoadCheckpoint(saved) if saved else LoadModel(), tuple(range(saved, target)))
