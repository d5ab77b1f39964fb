"""Whose call it is."""

from typing import NamedTuple


class Caller(NamedTuple):
    """The attempt that a model call belongs to."""

    rollout_id: str
    attempt: int
