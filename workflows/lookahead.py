"""Sampling ahead of the step that trains: which steps may begin, and which policy versions may sample for them. Pure.

Step k trains at version k. With a lookahead of L it may begin at version k - L, so that its groups are sampled by
versions k - L to k, and by no older or newer one (NeMo-RL's `in_order` sampler). L = 0 is training on policy. At most
L + 1 steps of N groups are in flight or ready at a time.
"""

from collections.abc import Iterable
from itertools import takewhile


def may_begin(step: int, version: int, lookahead: int) -> bool:
    """Whether a step may be dispatched while the trainer is at `version`."""
    return step <= version + lookahead


def steps_to_begin(newest: int, version: int, lookahead: int, last_step: int) -> list[int]:
    """The steps after `newest`, the last one that was dispatched, that may begin now; `last_step` ends the run."""
    return list(takewhile(lambda step: may_begin(step, version, lookahead), range(newest + 1, last_step + 1)))


def versions_of(step: int, lookahead: int) -> range:
    """The policy versions that may sample for a step."""
    return range(max(0, step - lookahead), step + 1)


def newest_version(step: int, lookahead: int) -> int | None:
    """The newest policy version that may sample for a group of a step; None: the one that it begins with, alone."""
    return versions_of(step, lookahead)[-1] if lookahead else None


def staleness(step: int, versions: Iterable[int | None], lookahead: int) -> dict[str, float]:
    """How many versions the kept groups of a step are older than its policy; `stale` are those older than allowed.

    A group has the version of its oldest valid rollout.
    """
    known = [version for version in versions if version is not None]
    ages = [step - version for version in known]
    return {
        "mean": sum(ages) / len(ages) if ages else 0.0,
        "max": float(max(ages, default=0)),
        "stale": float(sum(version not in versions_of(step, lookahead) for version in known)),
    }
