"""Writes Hugging Face model folders: safetensors (sharded above 5 GB), config, tokenizer files of the source model.

A folder is written beside its place and renamed, so a folder that exists is complete.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from activities.training.megatron.hf_reader import INDEX
from activities.training.megatron.shape import read_config

MAX_SHARD_SIZE_BYTES = 5 * 10**9
_COMPANION_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})


class FolderWriter:
    """Writes a model folder from tensors that are added one by one; `finish` makes it visible."""

    def __init__(self, folder: Path, source: Path, dtype: torch.dtype) -> None:
        self._folder, self._source, self._dtype = folder, source, dtype
        self._temporary = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self._tensors: dict[str, Tensor] = {}
        self._pending_size_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._total_size_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is copied to the CPU."""
        size = tensor.numel() * tensor.element_size()
        if self._tensors and self._pending_size_bytes + size > MAX_SHARD_SIZE_BYTES:
            self._flush()
        self._tensors[name] = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        self._pending_size_bytes += size
        self._total_size_bytes += size

    def finish(self) -> None:
        """Write config and companion files, and put the folder in its place."""
        self._flush()
        self._name_shards()
        for path in sorted(self._source.iterdir()):
            if path.suffix in _COMPANION_SUFFIXES and path.is_file() and path.name not in ("config.json", INDEX):
                shutil.copyfile(path, self._temporary / path.name)
        config = read_config(self._source)
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = str(self._dtype).removeprefix("torch.")
        (self._temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in self._temporary.iterdir():
            _sync(path)
        _replace(self._temporary, self._folder)

    def _flush(self) -> None:
        if not self._tensors:
            return
        path = self._temporary / f"shard-{len(self._shards)}"
        save_file(self._tensors, path, metadata={"format": "pt"})
        self._shards.append(tuple(self._tensors))
        self._tensors, self._pending_size_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._temporary / "shard-0").rename(self._temporary / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._temporary / f"shard-{i}").rename(self._temporary / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_size_bytes}, "weight_map": weight_map}
        (self._temporary / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _replace(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; an older folder of that name is removed first."""
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
