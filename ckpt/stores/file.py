"""A store in a directory: O_DIRECT writes, fsync of file and directory, exclusive create."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ckpt.stores.base import Buffer, Capabilities, Limits, ObjectInfo, Outcome, Store, Upload
from ckpt.stores.coalesce import Batch
from ckpt.stores.errors import ObjectShort, StoreError
from ckpt.stores.files import (
    PARTIAL,
    DirectFile,
    explained,
    link_new,
    make_directory,
    remove_if_orphan,
    sync_directory,
)
from ckpt.stores.parts import check_part, check_whole

# In the name of an unfinished file: the lock of a file of this host is to be believed.
HOST_TAG = f"@{zlib.crc32(socket.gethostname().encode()):08x}"


class FileStore(Store):
    """`file:///path` or a plain path.

    A file is written under a hidden name beside its own, fsynced, and renamed; then the directory
    is fsynced. The deadlines of `limits` cannot interrupt a kernel call: a dead NFS server blocks
    the thread that waits for it.
    """

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        super().__init__(url, limits)
        self.root = Path(url.removeprefix("file://")).absolute()
        self._capabilities: Capabilities | None = None

    def put(self, key: str, data: Buffer) -> None:
        with self._written(key, data) as upload:
            upload.finish()

    def put_if_absent(self, key: str, data: Buffer) -> Outcome:
        with self._written(key, data) as upload:
            return upload.finish_if_absent(memoryview(data).cast("B"))

    def _written(self, key: str, data: Buffer) -> FileUpload:
        view = memoryview(data).cast("B")
        upload = FileUpload(self, key, len(view), part_bytes=max(len(view), 1))
        try:
            if len(view):
                upload.put_part(0, view)
        except BaseException:
            upload.abort()
            raise
        return upload

    def start_upload(self, key: str, size_bytes: int) -> Upload:
        return FileUpload(self, key, size_bytes, part_bytes=self.limits.part_bytes)

    def path(self, key: str) -> Path:
        """The file of `key`. A key never leaves the directory of the store."""
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts) or "\0" in key:
            raise StoreError(
                f"{key!r} cannot be a key", remedy="Use names such as step-7/manifest.json."
            )
        return self.root.joinpath(*parts)

    def stat(self, key: str) -> ObjectInfo | None:
        with explained(self.path(key), "look at"):
            try:
                seen = self.path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key=key, size_bytes=seen.st_size, modified_s=seen.st_mtime)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        keys = (k for k in self._keys(prefix) if not k.endswith(PARTIAL))
        for key in sorted(keys):
            info = self.stat(key)
            if info is not None:  # deleted while we listed
                yield info

    def _keys(self, prefix: str) -> Iterator[str]:
        top = self.root / prefix.rpartition("/")[0]
        for directory, _, names in os.walk(top):
            for name in names:
                key = (Path(directory) / name).relative_to(self.root).as_posix()
                if key.startswith(prefix):
                    yield key

    def delete(self, keys: Iterable[str]) -> None:
        touched = set()
        for key in keys:
            path = self.path(key)
            with explained(path, "delete"):
                path.unlink(missing_ok=True)
            touched.add(path.parent)
        for directory in sorted(touched, reverse=True):
            self._drop_empty(directory)

    def _drop_empty(self, directory: Path) -> None:
        """Remove `directory` and its parents below the root while they are empty, durably."""
        while directory != self.root and self.root in directory.parents:
            try:
                directory.rmdir()
            except OSError:  # not empty, or already gone
                break
            directory = directory.parent
        if directory.exists():
            sync_directory(directory)

    def abort_orphans(self, prefix: str = "", *, older_than_s: float) -> Sequence[str]:
        found = [k for k in self._keys("") if k.endswith(PARTIAL)]
        return [k for k in found if self._drop_orphan(k, prefix, older_than_s)]

    def _drop_orphan(self, key: str, prefix: str, older_than_s: float) -> bool:
        directory, _, name = key.rpartition("/")
        target = f"{directory}/{name[1:]}" if directory else name[1:]
        if key.endswith(f"{HOST_TAG}{PARTIAL}"):
            older_than_s = 0.0  # of this host: the lock alone tells whether its writer lives
        return target.startswith(prefix) and remove_if_orphan(self.root / key, older_than_s)

    def probe(self) -> Capabilities:
        if self._capabilities is None:
            key = f"probe-{secrets.token_hex(8)}"
            try:
                first = self.put_if_absent(key, b"1")
                second = self.put_if_absent(key, b"2")
            finally:
                self.delete([key])
            holds = first is Outcome.CREATED and second is Outcome.EXISTS
            self._capabilities = Capabilities(
                conditional_put=holds, lists_orphans=True, detail="hard links" if holds else ""
            )
        return self._capabilities

    def _read(self, batch: Batch) -> None:
        path = self.path(batch.key)
        with explained(path, "read"):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _fill(file, batch, path)
            finally:
                os.close(file)


def _fill(file: int, batch: Batch, path: Path) -> None:
    """Read until every buffer is full; a file that ends before is an error, never a short read."""
    waiting, at = list(batch.into), batch.offset
    while waiting:
        count = os.preadv(file, waiting, at)
        if count == 0:
            end = batch.offset + batch.size_bytes
            raise ObjectShort(f"{path} ends at {at:,}, but bytes up to {end:,} were asked")
        at += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]


class FileUpload(Upload):
    """A hidden file that is locked while its writer lives, so that orphans can be told apart."""

    def __init__(self, store: FileStore, key: str, size_bytes: int, *, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self._key, self._size, self._path = key, size_bytes, store.path(key)
        self._sent: set[int] = set()
        self._lock = threading.Lock()
        name = f".{self._path.name}.{secrets.token_hex(6)}{HOST_TAG}{PARTIAL}"
        self._partial = self._path.with_name(name)
        with explained(self._path, "create", size_bytes):
            make_directory(self._path.parent)
            self._file: DirectFile | None = DirectFile(self._partial, size_bytes)

    def put_part(self, index: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        check_part(self._key, index, len(view), self.part_bytes, self._size)
        assert self._file is not None, "put_part after finish() or abort()"
        with explained(self._path, "write", len(view)):
            self._file.write(view, index * self.part_bytes)
        with self._lock:
            self._sent.add(index)

    def finish(self) -> None:
        with explained(self._path, "finish", self._size):
            self._seal()
            os.replace(self._partial, self._path)
            sync_directory(self._path.parent)

    def finish_if_absent(self, data: memoryview) -> Outcome:
        """Publish unless there is a file; one that holds the same bytes counts as ours."""
        with explained(self._path, "create", self._size):
            self._seal()
            outcome = link_new(self._partial, self._path)
            sync_directory(self._path.parent)
            if outcome is Outcome.EXISTS and self._path.read_bytes() == data:
                return Outcome.CREATED
            return outcome

    def _seal(self) -> None:
        assert self._file is not None, "finish() twice"
        check_whole(self._key, self._sent, self.part_bytes, self._size)
        self._file.sync()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def abort(self) -> None:
        self._close()
        try:
            self._partial.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES):
                raise
