"""What a checkpoint holds: its manifest names every file with size and sha256, and is written after all of them.

A folder without a manifest, or with one that does not fit its files, is no checkpoint. Pure: no torch here.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.files import file_digest
from activities.training.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_ELSE = "Delete the folder and choose an older checkpoint; without one, training starts again from the model itself."


class Layout(BaseModel):
    """The ranks that wrote a checkpoint, and the form of their state."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1)
    data: int = Field(ge=1)
    distributed_optimizer: bool
    dtype: str

    def __str__(self) -> str:
        optimizer = "distributed optimizer" if self.distributed_optimizer else "plain optimizer"
        return f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}, {self.dtype}, {optimizer}"


class FileRecord(BaseModel):
    """One file of a checkpoint; `name` is relative to its folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size_bytes: int = Field(ge=0)
    sha256: str


class Manifest(BaseModel):
    """The content of a checkpoint. `version` is the policy version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int
    version: int = Field(ge=0)
    layout: Layout
    files: tuple[FileRecord, ...] = Field(min_length=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; `CheckpointError` when there is none that this code can read."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no complete checkpoint in {folder}: it has no {MANIFEST}. {_ELSE}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). {_ELSE}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {found}; this trainer reads {FORMAT_VERSION}. {_ELSE}")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest ({error}). {_ELSE}") from error


def verify(folder: Path, digests: bool) -> Manifest:
    """Check that every file is there with its size, and with its digest if `digests` (reads all of it)."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files, digests=digests)
    return manifest


def verify_files(folder: Path, files: Iterable[FileRecord], *, digests: bool) -> None:
    """`CheckpointError` for the first of `files` that is missing or not as it was written."""
    for file in files:
        path = folder / file.name
        try:
            size = path.stat().st_size
            digest = file_digest(path) if digests and size == file.size_bytes else file.sha256
        except OSError as error:
            raise CheckpointError(f"{path} of a checkpoint cannot be read ({error.strerror}). {_ELSE}") from error
        if size != file.size_bytes:
            raise CheckpointError(f"{path} has {size} bytes; {MANIFEST} says {file.size_bytes}. {_ELSE}")
        if digest != file.sha256:
            raise CheckpointError(f"{path} has sha256 {digest[:12]}; {MANIFEST} says {file.sha256[:12]}. {_ELSE}")


def file_record(folder: Path, name: str) -> FileRecord:
    """Size and sha256 of a file that was written."""
    path = folder / name
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=file_digest(path))
