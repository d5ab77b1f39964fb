"""Writes Hugging Face model folders: sharded safetensors, config, tokenizer files of the source model.

A folder is written beside its place and renamed, so a folder that exists is complete. Tensors go to disk as they come:
the writer never holds more than one shard, or one tensor where that is larger.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from activities.files import file_digest
from activities.training.megatron.hf_reader import INDEX
from activities.training.megatron.shape import read_config
from activities.training.staged_folder import StagedFolder, sync

MAX_SHARD_SIZE_BYTES = 10**9
_WRITTEN = ("config.json", INDEX)
_COMPANION_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})


class FolderWriter:
    """Writes a model folder from tensors that are added one by one; `finish` makes it visible."""

    def __init__(self, folder: Path, source: Path, dtype: torch.dtype, max_shard_size_bytes: int | None = None) -> None:
        self._folder, self._source, self._dtype = folder, source, dtype
        self._max_shard_size_bytes = max_shard_size_bytes or MAX_SHARD_SIZE_BYTES
        self._staged: StagedFolder | None = None
        self._tensors: dict[str, Tensor] = {}
        self._pending_size_bytes = 0
        self._shards: list[tuple[str, ...]] = []
        self._total_size_bytes = 0

    @property
    def pending_size_bytes(self) -> int:
        """Bytes of the tensors that are in memory and in no file yet."""
        return self._pending_size_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is copied to the CPU."""
        size = tensor.numel() * tensor.element_size()
        if self._tensors and self._pending_size_bytes + size > self._max_shard_size_bytes:
            self._flush()
        self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())
        self._pending_size_bytes += size
        self._total_size_bytes += size
        if self._pending_size_bytes >= self._max_shard_size_bytes:
            self._flush()

    def finish(self) -> None:
        """Write config and companion files, and put the folder in its place.

        A folder that holds the same files already is kept as it is, since a server may be reading it. One that differs
        is exchanged: a server that has its files open reads on in the old ones; one that opens them during the exchange
        may see both, and tells by the digest of the version.
        """
        self._flush()
        path = self._path()
        self._name_shards(path)
        for companion in sorted(self._source.iterdir()):
            if companion.suffix in _COMPANION_SUFFIXES and companion.is_file() and companion.name not in _WRITTEN:
                shutil.copyfile(companion, path / companion.name)
        config = read_config(self._source)
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
            config[key] = str(self._dtype).removeprefix("torch.")
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in path.iterdir():
            sync(file)
        assert self._staged is not None
        self._staged.publish(keep=lambda there: _same_files(path, there))

    def discard(self) -> None:
        """Give up: remove what was written, unless it is finished."""
        self._tensors, self._pending_size_bytes = {}, 0
        if self._staged is not None:
            self._staged.discard()

    def _path(self) -> Path:
        if self._staged is None:
            self._staged = StagedFolder(self._folder)
        return self._staged.path

    def _flush(self) -> None:
        if not self._tensors:
            return
        path = self._path() / f"shard-{len(self._shards)}"
        save_file(self._tensors, path, metadata={"format": "pt"})
        sync(path)
        self._shards.append(tuple(self._tensors))
        self._tensors, self._pending_size_bytes = {}, 0

    def _name_shards(self, path: Path) -> None:
        count = len(self._shards)
        if count == 1:
            (path / "shard-0").rename(path / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (path / f"shard-{i}").rename(path / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_size_bytes}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _same_files(left: Path, right: Path) -> bool:
    """Whether both folders hold the same files with the same bytes."""
    names = sorted(path.name for path in left.iterdir())
    if names != sorted(path.name for path in right.iterdir()):
        return False
    return all(
        (left / name).stat().st_size == (right / name).stat().st_size
        and file_digest(left / name) == file_digest(right / name)
        for name in names
    )
