"""The watch over a step on all ranks: how far it is, and whether rank 0 still wants it; the ranks stop at one place.

Rank 0's event loop and its engine's thread share a `Signal`. Before each micro-batch the ranks agree on it, so that no
rank waits in a collective for one that has left.
"""

import threading
from collections.abc import Callable

from activities.training.watch import StepCancelled

Agree = Callable[[bool], bool]


class Signal:
    """What two threads tell each other about the command under way: where it is, and that nobody waits for it."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.reached = ""

    @property
    def stopped(self) -> bool:
        """Whether nobody waits for the command any more."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Ask the command to end where it can do so without a trace."""
        self._stopped.set()


class RankWatch:
    """The Watch of one rank. `agree` is collective: True on all ranks when one of them says so."""

    def __init__(self, signal: Signal, agree: Agree) -> None:
        self._signal, self._agree = signal, agree

    def reached(self, phase: str, micro_batch: int, micro_batches: int) -> None:
        """Before a micro-batch (from 0) of a pass; collective. Raises StepCancelled, then on all ranks at once."""
        self._signal.reached = f"{phase}, micro-batch {micro_batch + 1} of {micro_batches}"
        if self._agree(self._signal.stopped):
            raise StepCancelled(f"stopped before {self._signal.reached}")
