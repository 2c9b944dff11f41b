"""A store in what fsspec opens (gs://, abfs://, sftp://, s3:// by s3fs), with our own deadlines."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import fsspec

from ckpt.stores.base import Buffer, Capabilities, Limits, ObjectInfo, Outcome, Store, Upload
from ckpt.stores.coalesce import Batch
from ckpt.stores.errors import ObjectMissing, ObjectShort, StoreError, StoreUnavailable
from ckpt.stores.fsspec_calls import call_async, call_sync, explained
from ckpt.stores.parts import check_part, check_whole
from ckpt.stores.tries import Deadline, with_tries

# What file systems raise when a create finds an object: s3fs says EINVAL unless the answer of the
# server names the condition.
REFUSALS = {errno.EEXIST, errno.EINVAL}
# The manifest has checksums of every byte; botocore's would cost CPU, and they refuse ranged reads
# from servers that answer them with 200.
OUR_CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


class FsspecStore(Store):
    """Any URL of fsspec. Object stores publish a file when it is closed; other file systems get it
    under another name and rename it.

    Uploads in parts are spooled in a temporary file (TMPDIR) and sent at `finish()`, because
    fsspec has no parts that come in any order. Unfinished ones cannot be listed.
    """

    def __init__(
        self, url: str, limits: Limits | None = None, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(url, limits)
        wanted = {"use_listings_cache": False, "skip_instance_cache": True, **(options or {})}
        if url.startswith("s3://"):
            wanted["config_kwargs"] = {**OUR_CHECKSUMS, **wanted.get("config_kwargs", {})}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **wanted)
        except (ImportError, ValueError) as error:
            raise StoreError(
                f"{url} cannot be opened: {error}",
                remedy="Install the fsspec package of this protocol (gcsfs, adlfs, sshfs).",
            ) from error
        self._root = self._root.rstrip("/")
        self._is_async = bool(getattr(self._fs, "async_impl", False))
        self._is_s3 = type(self._fs).__name__ == "S3FileSystem"
        self._capabilities: Capabilities | None = None

    def path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def call(self, name: str, *arguments: Any, tries_max: int | None = None, **named: Any) -> Any:
        """One method of the file system with tries and deadline; a hanging one is left behind."""
        what = f"{name} {arguments[0] if arguments else self.url}"
        return with_tries(
            partial(self._call_once, name, arguments, named),
            what=what,
            tries_max=tries_max or self.limits.tries_max,
            deadline=Deadline.after(self.limits.operation_timeout_s, what),
            request_timeout_s=self.limits.request_timeout_s,
        )

    def _call_once(
        self, name: str, arguments: Sequence[Any], named: dict[str, Any], deadline: Deadline
    ) -> Any:
        with explained(f"{name} {self.url}"):
            if self._is_async and hasattr(self._fs, f"_{name}"):
                method = getattr(self._fs, f"_{name}")
                return call_async(self._fs.loop, method, arguments, named, deadline)
            return call_sync(getattr(self._fs, name), arguments, named, deadline)

    # --- objects

    def put(self, key: str, data: Buffer) -> None:
        self._publish(key, lambda path: self.call("pipe_file", path, bytes(data)))

    def _publish(self, key: str, write: Callable[[str], object]) -> None:
        if self._is_async:
            write(self.path(key))
            return
        partial_path = f"{self.path(key)}.{secrets.token_hex(6)}.partial"
        self.call("makedirs", self.path(key).rpartition("/")[0], exist_ok=True)
        try:
            write(partial_path)
            self.call("mv", partial_path, self.path(key))
        except BaseException:
            self._forget(partial_path)
            raise

    def _forget(self, path: str) -> None:
        try:
            self.call("rm_file", path, tries_max=1)
        except StoreError:
            pass

    def put_if_absent(self, key: str, data: Buffer) -> Outcome:
        if not self.probe().conditional_put:
            if self.stat(key) is None:
                self.put(key, data)
            return self._whose(key, data, ours=Outcome.UNGUARDED)
        if self._create(key, data):
            return Outcome.CREATED
        return self._whose(key, data, ours=Outcome.CREATED)

    def _create(self, key: str, data: Buffer) -> bool:
        """False when an object is there already."""
        if not self._is_async:
            self.call("makedirs", self.path(key).rpartition("/")[0], exist_ok=True)
        try:
            self.call("pipe_file", self.path(key), bytes(data), mode="create")
        except StoreError as error:
            if error.facts.get("errno") in REFUSALS and self.stat(key) is not None:
                return False
            raise
        return True

    def _whose(self, key: str, data: Buffer, *, ours: Outcome) -> Outcome:
        try:
            return ours if self.get(key) == memoryview(data) else Outcome.EXISTS
        except ObjectMissing:
            return Outcome.EXISTS

    def start_upload(self, key: str, size_bytes: int) -> Upload:
        return _SpooledUpload(self, key, size_bytes)

    def send_file(self, key: str, local: str) -> None:
        """Publish a local file, in parallel parts where the file system has them (s3fs)."""
        width = {"chunksize": max(self.limits.part_bytes, 5 << 20)}
        width["max_concurrency"] = self.limits.connections_max
        named = width if self._is_s3 else {}
        self._publish(key, lambda path: self.call("put_file", local, path, **named))

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            info = self.call("info", self.path(key))
        except ObjectMissing:
            return None
        return None if info.get("type") == "directory" else _info(key, info)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._fs.invalidate_cache()
        directory = prefix.rpartition("/")[0]
        try:
            found = self.call("find", self.path(directory).rstrip("/"), detail=True)
        except ObjectMissing:
            return
        start = self._root.lstrip("/") + "/"
        keys = {path.lstrip("/").removeprefix(start): info for path, info in found.items()}
        for key in sorted(keys):
            if key.startswith(prefix) and not key.endswith(".partial"):
                yield _info(key, keys[key])

    def delete(self, keys: Iterable[str]) -> None:
        self.run_parallel([partial(self._delete_one, key) for key in keys])

    def _delete_one(self, key: str) -> None:
        try:
            self.call("rm_file", self.path(key))
        except ObjectMissing:
            pass

    def abort_orphans(self, prefix: str = "", *, older_than_s: float) -> Sequence[str]:
        return []

    def probe(self) -> Capabilities:
        if self._capabilities is None:
            key = f"probe-{secrets.token_hex(8)}"
            try:
                holds = self._create(key, b"1") and not self._create(key, b"2")
                holds = holds and self.get(key) == b"1"
                detail = "create mode holds" if holds else "create mode replaces"
            except (StoreError, TypeError) as error:
                holds, detail = False, f"no create mode: {error}"
            finally:
                self._delete_one(key)
            self._capabilities = Capabilities(
                conditional_put=holds, lists_orphans=False, detail=detail
            )
        return self._capabilities

    def _read(self, batch: Batch) -> None:
        end = batch.offset + batch.size_bytes
        path = self.path(batch.key)
        try:
            data = memoryview(self.call("cat_file", path, start=batch.offset, end=end))
        except StoreError as error:  # a range behind the end is an error in some, b"" in others
            if error.retryable or self.size(batch.key) >= end:
                raise
            data = memoryview(b"")
        if len(data) != batch.size_bytes:
            size = self.size(batch.key)  # raises ObjectMissing
            raise ObjectShort(f"{path} has {size:,} bytes, bytes up to {end:,} were asked")
        for into in batch.into:
            into[:], data = data[: len(into)], data[len(into) :]


class _SpooledUpload(Upload):
    def __init__(self, store: FsspecStore, key: str, size_bytes: int) -> None:
        self._store, self._key, self._size = store, key, size_bytes
        self.part_bytes = store.limits.part_bytes
        self._sent: set[int] = set()
        self._spool = tempfile.NamedTemporaryFile(prefix="ckpt-upload-")  # noqa: SIM115

    def put_part(self, index: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        check_part(self._key, index, len(view), self.part_bytes, self._size)
        at = index * self.part_bytes
        with explained(f"spool {self._key} in {self._spool.name}"):
            while len(view):
                count = os.pwrite(self._spool.fileno(), view, at)
                view, at = view[count:], at + count
        self._sent.add(index)

    def finish(self) -> None:
        check_whole(self._key, self._sent, self.part_bytes, self._size)
        self._store.send_file(self._key, self._spool.name)
        there = self._store.size(self._key)
        if there != self._size:
            raise StoreUnavailable(
                f"{self._key} has {there:,} bytes after {self._size:,} were sent"
            )

    def abort(self) -> None:
        self._spool.close()


def _info(key: str, info: dict[str, Any]) -> ObjectInfo:
    stamps = (info.get(name) for name in ("LastModified", "mtime", "updated", "created"))
    return ObjectInfo(
        key=key, size_bytes=int(info["size"] or 0), modified_s=next(map(_seconds, stamps), 0.0)
    )


def _seconds(stamp: object) -> float:
    if isinstance(stamp, datetime):
        return stamp.timestamp()
    if isinstance(stamp, str):
        try:
            return datetime.fromisoformat(stamp).timestamp()
        except ValueError:
            return 0.0
    return float(stamp) if isinstance(stamp, int | float) else 0.0
