"""Reads the tensors of a Hugging Face folder one by one, and checks that it has what training and serving need."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from activities.training.errors import ModelFolderError

INDEX = "model.safetensors.index.json"


def check_tokenizer(folder: Path) -> None:
    """Raise when `folder` has no tokenizer: an exported policy needs one to be served."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelFolderError(
            f"The model folder {folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json). Copy the "
            "model's tokenizer files into it."
        )


class TensorReader:
    """The tensors of a folder by name, read one at a time. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _tensor_files(folder)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored precision."""
        file = self._files.get(name)
        if file is None:
            raise ModelFolderError(
                f"The weights in {self._folder} have no tensor {name}, which its config.json calls for. Download or "
                "export the model again."
            )
        if file not in self._open:
            self._open[file] = _open_safetensors(self._folder / file)
        return self._open[file].get_tensor(name)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path} cannot be read ({error}). Download or export the model again.") from error


def _tensor_files(folder: Path) -> dict[str, str]:
    """File of each tensor."""
    index = folder / INDEX
    if index.is_file():
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(
            f"The model folder {folder} has no *.safetensors file. Convert the model with "
            "save_pretrained(folder, safe_serialization=True)."
        )
    weight_map: dict[str, str] = {}
    for file in files:
        weight_map |= dict.fromkeys(_open_safetensors(folder / file).keys(), file)
    return weight_map
