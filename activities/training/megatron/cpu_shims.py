"""Lets Megatron-core run without CUDA. Active only inside `megatron_device()`; does nothing when CUDA is present.

Megatron-core names CUDA in a few places even when every tensor is on the CPU. Each shim below says where. They hold
for the calling thread and are undone on leaving.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _CudaNamesMeanCpu(TorchFunctionMode):
    """`device="cuda"` becomes the CPU, `Tensor.cuda()` does nothing, `Tensor.type()` names the CUDA type.

    The device: pipeline schedules (token counter), gradient norm and clipping, constructors of the optimizers.
    `cuda()`: embeddings tied over pipeline stages. The type name: the assertion in `clip_grad_by_total_norm_fp32`, type
    checks of the distributed optimizer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args)


@contextmanager
def megatron_device() -> Iterator[None]:
    """Run Megatron-core on this machine's device: CUDA as it is, or the CPU with the shims."""
    if torch.cuda.is_available():
        yield
        return
    with (
        # DDP buffers, rotary embeddings, pipeline communication, finalising a checkpoint.
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        # Saving a checkpoint, pipeline communication.
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        _CudaNamesMeanCpu(),
    ):
        yield
