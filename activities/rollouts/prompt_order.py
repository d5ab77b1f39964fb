"""The order in which a run draws its prompts: every epoch is a permutation, fixed by seed and epoch."""

import random
from functools import lru_cache


def row_of_position(position: int, rows: int, seed: int) -> int:
    """Row index of the `position`-th training prompt of a run (0-based) in a dataset of `rows` rows."""
    epoch, place = divmod(position, rows)
    return _permutation(rows, seed, epoch)[place]


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
