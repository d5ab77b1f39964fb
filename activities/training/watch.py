"""What an engine tells while it trains, and how it is stopped: between micro-batches, by all ranks at one place.

The passes of a step, in order: "previous" (only with a log-probability filter), "reference" (only with a KL term),
"gradient". Under pipeline parallelism a pass is announced once, before its first micro-batch.
"""

from typing import Protocol


class StepCancelled(Exception):
    """Nobody waits for the step any more. The weights were not changed."""


class Watch(Protocol):
    """Told by every rank in the same order."""

    def reached(self, phase: str, micro_batch: int, micro_batches: int) -> None:
        """Before a micro-batch (from 0) of a pass; collective. Raises StepCancelled, then on all ranks at once."""
        ...


class Unwatched:
    """Nobody looks, nobody cancels."""

    def reached(self, phase: str, micro_batch: int, micro_batches: int) -> None:
        """Go on."""
