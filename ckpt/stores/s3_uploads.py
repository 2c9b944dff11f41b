"""Uploads to S3 in parts, of which none is left behind, and small ones in a single put."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ckpt.stores.base import Buffer, Upload
from ckpt.stores.errors import StoreError, StoreUnavailable
from ckpt.stores.parts import check_part, check_whole, upload_part_bytes
from ckpt.stores.s3_answers import Meaning, as_error, field

if TYPE_CHECKING:
    from ckpt.stores.s3 import S3Store

PARTS_MAX, PART_BYTES_MIN = 10_000, 5 << 20


class SmallUpload(Upload):
    """At most one part: kept until `finish()`, then put at once."""

    def __init__(self, store: S3Store, key: str, size_bytes: int) -> None:
        self._store, self._key, self._size = store, key, size_bytes
        self._data = b""
        self.part_bytes = store.limits.single_put_bytes_max

    def put_part(self, index: int, data: Buffer) -> None:
        check_part(self._key, index, memoryview(data).nbytes, self.part_bytes, self._size)
        self._data = bytes(data)

    def finish(self) -> None:
        check_whole(self._key, {0} if self._data else set(), self.part_bytes, self._size)
        self._store.put(self._key, self._data)

    def abort(self) -> None:
        self._data = b""


class PartsUpload(Upload):
    """A multipart upload: parts from any thread, published by one request."""

    def __init__(self, store: S3Store, key: str, size_bytes: int) -> None:
        self._store, self._key, self._size = store, key, size_bytes
        self._name = store.name(key)
        self.part_bytes = upload_part_bytes(
            size_bytes,
            part_bytes=store.limits.part_bytes,
            parts_max=PARTS_MAX,
            least=PART_BYTES_MIN,
        )
        self._etags: dict[int, str] = {}
        self._lock = threading.Lock()
        started = store.must("create_multipart_upload", Key=self._name).body
        self._id: str | None = field(started, "UploadId")

    def put_part(self, index: int, data: Buffer) -> None:
        check_part(self._key, index, memoryview(data).nbytes, self.part_bytes, self._size)
        assert self._id is not None, "put_part after finish() or abort()"
        answer = self._store.must(
            "upload_part", Key=self._name, UploadId=self._id, PartNumber=index + 1, body=data
        )
        with self._lock:
            self._etags[index] = answer.headers.get("etag", "")

    def finish(self) -> None:
        check_whole(self._key, self._etags.keys(), self.part_bytes, self._size)
        assert self._id is not None, "finish() after finish() or abort()"
        answer, verdict = self._store.ask(
            "complete_multipart_upload", Key=self._name, UploadId=self._id, body=self._order()
        )
        # A retry after a lost answer finds the upload gone and the object there.
        if verdict.meaning not in (Meaning.OK, Meaning.MISSING):
            raise as_error(verdict, f"complete upload of {self._key}", answer.headers)
        self._check_size()
        self._id = None

    def _order(self) -> bytes:
        rows = (
            f"<Part><PartNumber>{index + 1}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for index, etag in sorted(self._etags.items())
        )
        return f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()

    def _check_size(self) -> None:
        """Look at what is there now: a store that dropped a part must not go unnoticed."""
        info = self._store.stat(self._key)
        if info is None:
            raise StoreUnavailable(f"the upload of {self._key} was finished, but it is not there")
        if info.size_bytes != self._size:
            raise StoreError(
                f"{self._key} has {info.size_bytes:,} bytes in the store, {self._size:,} were sent",
                remedy="The store lost a part of the upload. Save again; report it to its owner.",
            )

    def abort(self) -> None:
        upload_id, self._id = self._id, None
        if upload_id is None:
            return
        try:
            self._store.ask("abort_multipart_upload", Key=self._name, UploadId=upload_id)
        except StoreError:  # `abort_orphans` removes it at the next start
            pass
