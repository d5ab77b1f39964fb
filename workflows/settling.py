"""How a group settles: pure rules over rollouts that are valid, masked or lost.

Every group of settled rollouts has exactly one outcome, and one more valid rollout never makes it worse.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from configs.failure import FailureConfig
from workflows.messages import Bucket, Failure, Message, Purpose, RolloutResult, RolloutState

Outcome = Literal["sealed", "parked", "dropped"]


class Counts(Message):
    """Rollouts of a group by state. valid + masked + lost + open = G."""

    valid: int
    masked: int
    lost: int
    open: int

    @property
    def total(self) -> int:
        """G."""
        return self.valid + self.masked + self.lost + self.open


def counted(states: Iterable[RolloutState]) -> Counts:
    """Count the rollouts of a group."""
    every = list(states)
    return Counts(
        valid=every.count("valid"), masked=every.count("masked"), lost=every.count("lost"), open=every.count("open")
    )


def can_train(counts: Counts, min_valid: int, failure: FailureConfig) -> bool:
    """Whether a group is good as it is: enough valid rollouts, and no lost one where that costs the group."""
    if failure.on_lost_rollout == "drop_group" and counts.lost:
        return False
    return counts.valid >= min_valid


def outcome(counts: Counts, min_valid: int, purpose: Purpose, failure: FailureConfig) -> Outcome:
    """What becomes of a group whose rollouts have settled.

    Only a group that trains is worth an operator's time; nobody waits for an evaluation or a replay.
    """
    if counts.open:
        raise ValueError(f"{counts.open} of {counts.total} rollouts have not settled")
    if can_train(counts, min_valid, failure):
        return "sealed"
    return "parked" if failure.on_dropped_prompt == "park" and purpose == "train" else "dropped"


def bucket_of(results: Mapping[int, RolloutResult], failures: Mapping[int, Failure]) -> Bucket:
    """Whose fault a drop is: infra as soon as one lost rollout's last failure was. `failures` are the last ones."""
    lost = [index for index, result in results.items() if result.state == "lost"]
    return "infra" if any(index in failures and failures[index].bucket == "infra" for index in lost) else "data"
