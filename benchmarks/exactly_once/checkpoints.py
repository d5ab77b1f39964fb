"""The state in a checkpoint as one digest: model, both moments of the optimizer, and its step counters."""

import hashlib
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

COMMON = "common.pt"  # what is no tensor: learning rate, counters


def state_digest(folder: Path) -> str:
    """sha256 over name, type, shape and bytes of every tensor, and over the common part.

    The states of random number generators are left out: they tell what else their process did, and nothing draws.
    """
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in sorted(stored.items())
        if isinstance(kind, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this process is alone
        load(tensors, storage_reader=reader, no_dist=True)
    digest = hashlib.sha256((folder / COMMON).read_bytes())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
