"""A checkpoint that is not as it was written is found, by sizes or by digests, and named with the file."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.training.checkpoint_manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Layout,
    Manifest,
    file_record,
    read_manifest,
    verify,
)
from activities.training.errors import CheckpointError

ROOT = Path(__file__).parent.parent.parent
FILES = {"weights": b"some weights" * 50, "empty": b"", ".index": bytes(range(256))}
LAYOUT = Layout(tensor=2, pipeline=1, data=4, distributed_optimizer=True, dtype="bfloat16")


def write(folder: Path) -> Path:
    """A folder that is complete."""
    folder.mkdir(exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    records = tuple(file_record(folder, name) for name in FILES)
    manifest = Manifest(format=FORMAT_VERSION, version=12, layout=LAYOUT, files=records)
    (folder / MANIFEST).write_text(manifest.model_dump_json(), encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "version-12")


def test_an_unharmed_checkpoint_is_complete(folder: Path) -> None:
    assert verify(folder, digests=False) == read_manifest(folder)
    assert verify(folder, digests=True) == read_manifest(folder)
    assert read_manifest(folder).version == 12
    assert str(read_manifest(folder).layout) == "tensor 2 x pipeline 1 x data 4, bfloat16, distributed optimizer"


def change_manifest(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(content | values))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "weights").unlink(), r"version-12/weights .*No such file"),
        (lambda folder: (folder / "weights").write_bytes(b"x"), r"version-12/weights has 1 bytes; .* says 600"),
        (lambda folder: (folder / MANIFEST).unlink(), "no complete checkpoint in .*version-12"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), "manifest.json cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "has format None; this trainer reads 2"),
        (change_manifest(format=1), "has format 1; this trainer reads 2"),
        (change_manifest(files=[]), "is not a manifest"),
        (change_manifest(version=-1), "is not a manifest"),
        (change_manifest(more="x"), "is not a manifest"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)

    with pytest.raises(CheckpointError, match=message) as refused:
        verify(folder, digests=False)
    assert "choose an older checkpoint" in str(refused.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(name=st.sampled_from([name for name in FILES if FILES[name]]), data=st.data())
def test_any_other_byte_is_found_by_its_digest(tmp_path: Path, name: str, data: st.DataObject) -> None:
    folder = write(tmp_path / "checkpoint")
    content = bytearray(FILES[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (folder / name).write_bytes(content)

    assert verify(folder, digests=False) == read_manifest(folder)
    with pytest.raises(CheckpointError, match=f"{name} has sha256"):
        verify(folder, digests=True)


def test_a_folder_that_is_not_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        verify(tmp_path / "version-3", digests=False)


def test_the_manifest_is_read_without_torch() -> None:
    program = "import sys, activities.training.checkpoint_manifest; print('torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)

    assert ran.stdout.strip() == "False"
