"""A folder is there whole or not at all, whoever writes beside it and whoever dies while writing."""

import errno
import fcntl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from activities.training import staged_folder
from activities.training.staged_folder import StagedFolder

ROOT = Path(__file__).parent.parent.parent
WRITER = """
import sys
from pathlib import Path
from activities.training.staged_folder import StagedFolder
staged = StagedFolder(Path(sys.argv[1]))
(staged.path / "half").write_text("written")
print(staged.path.name, flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stage(place: Path, content: str) -> StagedFolder:
    staged = StagedFolder(place)
    (staged.path / "file").write_text(content)
    return staged


def never(_: Path) -> bool:
    return False


def always(_: Path) -> bool:
    return True


@contextmanager
def another_process(place: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A process that has begun to write; its folder, and the process."""
    command = [sys.executable, "-c", WRITER, str(place)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            yield writer.stdout.readline().strip(), writer
        finally:
            writer.kill()


def test_a_folder_appears_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    staged = stage(tmp_path / "run" / "version-3", "weights")
    assert not (tmp_path / "run" / "version-3").exists()

    staged.publish(keep=never)

    assert (tmp_path / "run" / "version-3" / "file").read_text() == "weights"
    assert names(tmp_path / "run") == ["version-3"]


def test_what_is_discarded_leaves_nothing(tmp_path: Path) -> None:
    staged = stage(tmp_path / "version-3", "weights")

    staged.discard()
    staged.discard()

    assert names(tmp_path) == []


def test_two_writers_of_one_place_do_not_meet_and_the_second_keeps_what_is_as_good(tmp_path: Path) -> None:
    first, second = stage(tmp_path / "version-3", "first"), stage(tmp_path / "version-3", "second")
    assert first.path != second.path

    first.publish(keep=always)
    second.publish(keep=always)

    assert (tmp_path / "version-3" / "file").read_text() == "first"
    assert names(tmp_path) == ["version-3"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_that_is_not_good_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(staged_folder, "_exchange", lambda *_: False)
    stage(tmp_path / "version-3", "old").publish(keep=never)
    (tmp_path / "version-3" / "old file").touch()

    stage(tmp_path / "version-3", "new").publish(keep=never)

    assert names(tmp_path / "version-3") == ["file"]
    assert (tmp_path / "version-3" / "file").read_text() == "new"
    assert names(tmp_path) == ["version-3"]


def test_a_replacement_that_fails_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_folder, "_exchange", lambda *_: False)
    stage(tmp_path / "version-3", "old").publish(keep=never)
    staged = stage(tmp_path / "version-3", "new")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == staged.path:
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="broken"):
            staged.publish(keep=never)
    staged.discard()

    assert (tmp_path / "version-3" / "file").read_text() == "old"
    assert names(tmp_path) == ["version-3"]


def test_a_file_in_the_place_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "version-3").write_text("a file")
    staged = stage(tmp_path / "version-3", "weights")

    with pytest.raises(OSError, match="Not a directory"):
        staged.publish(keep=never)
    staged.discard()

    assert (tmp_path / "version-3").read_text() == "a file"


def test_the_folder_of_a_dead_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    with another_process(tmp_path / "version-3") as (unfinished, writer):
        stage(tmp_path / "version-4", "weights").publish(keep=never)
        assert (tmp_path / unfinished / "half").read_text() == "written"

        writer.kill()
        writer.wait(timeout=60)
        assert (tmp_path / unfinished).exists()

    stage(tmp_path / "version-5", "weights").publish(keep=never)
    assert names(tmp_path) == ["version-4", "version-5"]


def test_a_process_that_died_before_or_after_its_folder_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".7-0123456789abcdef.lock").touch()
    (tmp_path / ".version-2.8-0123456789abcdef.partial").mkdir()
    (tmp_path / ".version-2.9-0123456789abcdef.replaced").mkdir()
    (tmp_path / ".hidden").mkdir()

    stage(tmp_path / "version-3", "weights").publish(keep=never)

    assert names(tmp_path) == [".hidden", "version-3"]


def test_where_there_are_no_locks_nothing_of_others_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    other = stage(tmp_path / "version-2", "other")

    stage(tmp_path / "version-3", "weights").publish(keep=never)
    other.publish(keep=never)

    assert names(tmp_path) == ["version-2", "version-3"]
