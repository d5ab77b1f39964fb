"""Folders that appear whole: written beside their place, under a name that no other process uses, and then renamed.

A process that dies leaves its unfinished folder; the next one that writes beside it takes it away. That the owner is
dead is known from a lock that the owner holds for as long as it lives, on whatever machine. Where the file system has
no locks, nothing is taken away.
"""

import ctypes
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

_NAME = re.compile(r"\.(?P<place>.+)\.(?P<token>\d+-[0-9a-f]{16})\.(partial|replaced)")
_LOCK = re.compile(r"\.(?P<token>\d+-[0-9a-f]{16})\.lock")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # renameat2(2)


class StagedFolder:
    """An empty folder to write to, `path`, that `publish` puts in its place or `discard` removes."""

    def __init__(self, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place.parent)
        self._place = place
        token = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock_path = place.with_name(f".{token}.lock")
        self._lock: IO[bytes] | None = _held_lock(self._lock_path)
        self.path = place.with_name(f".{place.name}.{token}.partial")
        self._aside = place.with_name(f".{place.name}.{token}.replaced")
        try:
            self.path.mkdir()
        except OSError:
            self.discard()
            raise

    def publish(self, keep: Callable[[Path], bool]) -> None:
        """Put the folder in its place, on disk. The files in it must be on disk already.

        A folder that is there stays when `keep` says that it is as good; else it is exchanged for the new one in one
        step where the file system can (renameat2), or in two with a moment without either. Who has files of the
        replaced folder open reads on in them. Who opens its files by name one after the other may get old and new
        ones, and must check a digest.
        """
        sync(self.path)
        try:
            self.path.rename(self._place)
        except OSError:
            if not self._place.is_dir():
                raise
            if not keep(self._place):
                self._replace()
        sync(self._place.parent)
        self.discard()

    def discard(self) -> None:
        """Remove what was not put in its place. A second call does nothing."""
        if self._lock is None:
            return
        for leftover in (self.path, self._aside):
            shutil.rmtree(leftover, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def _replace(self) -> None:
        if _exchange(self.path, self._place):
            return
        self._place.rename(self._aside)
        try:
            self.path.rename(self._place)
        except OSError:
            self._aside.rename(self._place)
            raise


def sync(path: Path) -> None:
    """Have a file or folder on disk before anything that is written later."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _held_lock(path: Path) -> IO[bytes]:
    """Create a file and lock it. Another process may find it unlocked and remove it before it is locked: try again."""
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # no locks here: the others cannot lock it either, and leave it alone
            return file
        if _is_at(path, file):
            return file
        file.close()


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file is still the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lockable(file: IO[bytes]) -> bool:
    """Lock the file; False when its owner lives, or when the file system cannot say."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Remove staged folders and locks whose owners are dead."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name) or _LOCK.fullmatch(path.name)
        if match is None:
            continue
        lock_path = folder / f".{match['token']}.lock"
        try:
            lock = lock_path.open("r+b")
        except FileNotFoundError:  # an owner makes its lock first and removes it last
            shutil.rmtree(path, ignore_errors=True)
            continue
        with lock:
            if _lockable(lock):
                if path != lock_path:
                    shutil.rmtree(path, ignore_errors=True)
                lock_path.unlink(missing_ok=True)


def _exchange(left: Path, right: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), _RENAME_EXCHANGE) == 0
