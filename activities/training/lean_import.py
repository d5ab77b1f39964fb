"""Importing Megatron-core without what the trainer never calls on a CPU: half of a rank's start. Does nothing when CUDA
is present, where Transformer Engine may call what it compiles.

Megatron-core hands its fused functions to `torch.compile` as it defines them, which imports the compiler; the trainer
has every fusion off (`megatron/model.py`). Its inference engine imports W&B's client, which has a process of its own
here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_UNUSED = "wandb"
_MISSING: Any = None  # what stands in `sys.modules` for a module that cannot be imported


@contextmanager
def lean_import() -> Iterator[None]:
    """Functions that are defined inside stay as they are written, and W&B's client cannot be imported."""
    if torch.cuda.is_available():
        yield
        return
    is_hidden = _UNUSED not in sys.modules
    if is_hidden:
        sys.modules[_UNUSED] = _MISSING
    try:
        with patch.object(torch, "compile", _as_written):
            yield
    finally:
        if is_hidden:
            del sys.modules[_UNUSED]


def _as_written(model: Any = None, **_: Any) -> Any:
    """In place of `torch.compile`, as a decorator with and without options."""
    return model if model is not None else lambda function: function
