"""Ranks that fail together: an error of one is raised by all, so that no rank waits for one that has left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from activities.training.errors import TrainingError

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """The values of all ranks, in their order. Collective."""
    values: list[Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreed(failure: Callable[[str], Exception]) -> Iterator[None]:
    """Every rank leaves the block without an error, or every rank with `failure(cause)` of the first that had one.

    Collective. The block may hold collective calls only if an error of one rank ends them on the others.
    """
    own: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch does not derive its own from Exception
        own = error
    causes = gathered(None if own is None else _cause(own))
    first = next((cause for cause in causes if cause is not None), None)
    if first is not None:
        raise failure(first) from own


def _cause(error: BaseException) -> str:
    """The trainer's errors speak for themselves; others need their type and their rank."""
    if isinstance(error, TrainingError):
        return str(error)
    return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
