"""The blob store: bytes under the sha256 of their content, written once, checked on every read.

A blob appears under its name whole or not at all: it is written to a temporary name, flushed to disk and renamed. On a
file system that is not local, `put` writes a temporary key and moves it, and trusts the store to keep what it accepted.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# (fsspec ships no types)

import asyncio
import hashlib
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from storage.errors import BlobCorrupt, BlobMissing, BlobUnreadable, BlobUrlInvalid, BlobWriteError


class BlobStore:
    """Blobs in a folder, or under any URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        try:
            files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BlobUrlInvalid(url, str(error)) from error
        self._files: Any = files
        self._root = root.rstrip("/")
        self._local = isinstance(files, LocalFileSystem)

    def path_of(self, digest: str) -> str:
        """Where a blob is, or would be."""
        return f"{self._root}/{digest[:2]}/{digest}"

    async def put(self, data: bytes) -> str:
        """Store bytes and return their digest; nothing to do when they are there."""
        return await asyncio.to_thread(self._put, data)

    async def exists(self, digest: str) -> bool:
        """Whether there is a blob with this digest; its content is not looked at."""
        return await asyncio.to_thread(self._exists, digest)

    async def get(self, digest: str) -> bytes:
        """The bytes with this digest. Raises BlobMissing, or BlobCorrupt when the content has another digest."""
        return await asyncio.to_thread(self._get, digest)

    def _put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        path = self.path_of(digest)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            if self._files.exists(path):
                return digest
            if self._local:
                _write_local(Path(temporary), Path(path), data)
            else:
                self._files.pipe_file(temporary, data)
                self._files.mv(temporary, path)
        except Exception as error:  # every file system has its own error types
            with suppress(Exception):
                self._files.rm_file(temporary)
            raise BlobWriteError(path, _cause(error)) from error
        return digest

    def _exists(self, digest: str) -> bool:
        path = self.path_of(digest)
        try:
            return bool(self._files.exists(path))
        except Exception as error:  # every file system has its own error types
            raise BlobUnreadable(path, _cause(error)) from error

    def _get(self, digest: str) -> bytes:
        path = self.path_of(digest)
        try:
            data: bytes = self._files.cat_file(path)
        except FileNotFoundError as error:
            raise BlobMissing(path) from error
        except Exception as error:  # every file system has its own error types
            raise BlobUnreadable(path, _cause(error)) from error
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise BlobCorrupt(path, found)
        return data


def _write_local(temporary: Path, path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    for folder in (path.parent, path.parent.parent):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
