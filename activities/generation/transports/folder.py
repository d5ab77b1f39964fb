"""An exported folder as the source of a broadcast: every tensor once, in the order of files and names.

Has what vLLM's senders want of a `WeightSource` (vllm.distributed.weight_transfer.base): what will come, and a fresh
pass over it each time. Both read the same headers, so they agree.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from activities.generation.errors import WeightsMissing
from activities.generation.weights import INDEX_NAME

# safetensors' names of the types that a policy is trained and served in, and PyTorch's.
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ParameterMeta:
    """One parameter of the stream; `dtype` is PyTorch's, `shape` that of the whole tensor."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


class FolderSource:
    """The weights of one version. Tensors are read onto `device` one at a time.

    Raises WeightsMissing where there is no weight file, or one holds a type that is not of `DTYPES`.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._files = _files(folder)
        self._device = device

    def metadata(self) -> list[ParameterMeta]:
        """From the headers of the files; no tensor is read."""
        torch = importlib.import_module("torch")
        found: list[ParameterMeta] = []
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    header = file.get_slice(name)
                    dtype = DTYPES.get(header.get_dtype())
                    if dtype is None:
                        raise WeightsMissing(
                            f"{path} holds {name} as {header.get_dtype()}; a policy is exported in one of "
                            f"{', '.join(DTYPES)}."
                        )
                    found.append(ParameterMeta(name, getattr(torch, dtype), tuple(header.get_shape())))
        return found

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for path in self._files:
            with safe_open(path, framework="pt", device=self._device) as file:
                for name in sorted(file.keys()):
                    yield name, file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """The files of the index where there is one, else all: a folder may hold weights of other formats beside."""
    index = folder / INDEX_NAME
    try:
        if index.exists():
            files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError) as error:
        raise WeightsMissing(f"The weights folder {folder} cannot be read: {error}.") from error
    if not files:
        raise WeightsMissing(f"The weights folder {folder} holds no .safetensors file.")
    return files
