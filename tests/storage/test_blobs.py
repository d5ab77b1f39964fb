"""Blobs: whole or not there, and never believed without their digest."""

import asyncio
import errno
import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.blobs import BlobStore
from storage.errors import BlobCorrupt, BlobMissing, BlobUnreadable, BlobUrlInvalid, BlobWriteError


def keys(store: BlobStore) -> list[str]:
    """All keys of a store in memory."""
    return fsspec.filesystem("memory").find(store.path_of("0" * 64).rsplit("/", 2)[0])


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(params=["folder", "file_url", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """The same store over a folder, a file:// URL, and a file system that is not local."""
    urls = {"folder": str(tmp_path), "file_url": tmp_path.as_uri(), "memory": f"memory://{uuid.uuid4().hex}"}
    return BlobStore(urls[request.param])


async def test_blob_is_read_back_under_its_sha256(store: BlobStore) -> None:
    digest = await store.put(b"tokens")

    assert digest == hashlib.sha256(b"tokens").hexdigest()
    assert await store.get(digest) == b"tokens"


async def test_blob_that_is_not_there_is_missing(store: BlobStore) -> None:
    with pytest.raises(BlobMissing, match="0" * 64):
        await store.get("0" * 64)


async def test_blob_exists_once_it_is_put(store: BlobStore) -> None:
    assert not await store.exists("0" * 64)
    assert await store.exists(await store.put(b"tokens"))


async def test_blob_put_by_many_at_once_is_there_once(store: BlobStore) -> None:
    data = os.urandom(200_000)
    digests = await asyncio.gather(*(store.put(data) for _ in range(8)))

    assert len(set(digests)) == 1
    assert await store.get(digests[0]) == data


async def test_blob_on_another_file_system_leaves_no_temporary_key() -> None:
    store = BlobStore(f"memory://{uuid.uuid4().hex}")
    digest = await store.put(b"tokens")

    assert keys(store) == [store.path_of(digest)]


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=2_000))
async def test_any_bytes_come_back_equal(data: bytes) -> None:
    store = BlobStore("memory://any-bytes")
    assert await store.get(await store.put(data)) == data


async def test_blob_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    path = Path(store.path_of(await store.put(b"tokens")))
    before = path.stat()

    await store.put(b"tokens")

    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files_under(tmp_path) == [path]


@pytest.mark.parametrize("content", [b"tokenS", b"token", b""])
async def test_corrupt_blob_is_refused(tmp_path: Path, content: bytes) -> None:
    store = BlobStore(str(tmp_path))
    digest = await store.put(b"tokens")
    Path(store.path_of(digest)).write_bytes(content)

    with pytest.raises(BlobCorrupt, match=digest):
        await store.get(digest)


async def test_blob_that_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    Path(store.path_of("0" * 64)).mkdir(parents=True)

    with pytest.raises(BlobUnreadable, match="directory"):
        await store.get("0" * 64)


async def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(BlobWriteError, match="Not a directory"):
        await BlobStore(str(tmp_path / "file")).put(b"tokens")


async def test_disk_full_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BlobWriteError, match="No space left on device"):
        await BlobStore(str(tmp_path)).put(b"tokens")
    monkeypatch.undo()

    assert files_under(tmp_path) == []
    assert await BlobStore(str(tmp_path)).put(b"tokens")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; only root can mount one."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a tiny file system needs root")
    mounted = subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let root mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_full_disk_keeps_the_blobs_that_are_there_and_nothing_half_written(tiny_disk: Path) -> None:
    store = BlobStore(str(tiny_disk))
    kept = await store.put(b"small")

    with pytest.raises(BlobWriteError, match="No space left on device"):
        await store.put(os.urandom(1_000_000))

    assert [path.name for path in files_under(tiny_disk)] == [kept]
    assert await store.get(kept) == b"small"


async def test_other_file_system_that_fails_leaves_no_temporary_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(f"memory://{uuid.uuid4().hex}")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Access denied")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.mv", refuse)
    with pytest.raises(BlobWriteError, match="Access denied"):
        await store.put(b"tokens")

    assert keys(store) == []


def test_url_that_no_file_system_knows_is_named() -> None:
    with pytest.raises(BlobUrlInvalid, match="nosuch://bucket/prefix"):
        BlobStore("nosuch://bucket/prefix")
