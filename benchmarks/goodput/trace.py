"""The failure trace: which attempt at which rollout fails, how, and at which of its model calls.

A pure function of the seed, so every policy meets the same failures: the first attempt at a rollout fails in the same
way at the same call, and later attempts draw from the same stream at the same rate.
"""

import random
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.goodput.episodes import model_calls

FailureKind = Literal["agent_error", "http_500", "reset", "hang"]


@dataclass(frozen=True)
class Failure:
    """One planned failure. `call` counts the model calls of the attempt from 0."""

    kind: FailureKind
    call: int


@dataclass(frozen=True)
class FailureTrace:
    """`rate`: the probability that an attempt at a rollout fails, 0 to 1."""

    seed: int
    rate: float

    def of(self, row: int, index: int, attempt: int) -> Failure | None:
        """The failure of try number `attempt` (from 0) at rollout `index` of the prompt in dataset row `row`."""
        draw = random.Random(f"failure/{self.seed}/{row}/{index}/{attempt}")
        if draw.random() >= self.rate:
            return None
        kind = draw.choice(get_args(FailureKind))
        return Failure(kind, draw.randrange(model_calls(self.seed, row, index)))

    def first_attempts(self, rows: int, rollouts: int) -> int:
        """How many first attempts fail."""
        return sum(self.of(row, index, 0) is not None for row in range(rows) for index in range(rollouts))
