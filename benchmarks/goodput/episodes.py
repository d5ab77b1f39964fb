"""How long the episodes are: a pure function of the seed, the same for the failure trace and for the environment."""

import random

LEAST_CALLS, MOST_CALLS = 3, 7


def model_calls(seed: int, row: int, index: int) -> int:
    """Model calls of an undisturbed rollout `index` of a dataset row: one for each use of the tool, and the answer."""
    return random.Random(f"episode/{seed}/{row}/{index}").randint(LEAST_CALLS, MOST_CALLS)
