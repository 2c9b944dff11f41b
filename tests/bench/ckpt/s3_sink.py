"""A fast S3 server that only keeps bytes in memory, with latency and a rate per connection.

`python -m tests.bench.ckpt.s3_sink LATENCY_S BYTES_PER_S` prints its port. It checks nothing: it
stands for a link, not for a store.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from urllib.parse import parse_qs, unquote, urlsplit

PIECE = 1 << 18
XML = "<?xml version='1.0'?>"


class Whole:
    """An object in the parts in which it came."""

    def __init__(self, parts: list[bytearray]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def cut(self, start: int, end: int) -> memoryview:
        at, found = 0, []
        for part in self.parts:
            if at < end and start < at + len(part):
                found.append(memoryview(part)[max(start - at, 0) : end - at])
            at += len(part)
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


class Sink:
    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.objects: dict[str, Whole] = {}
        self.parts: dict[str, dict[int, bytearray]] = {}

    def serve(self) -> None:
        server = socket.create_server(("127.0.0.1", 0), backlog=256)
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            while self._answer(connection):
                pass
        except OSError:
            pass
        finally:
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        head = bytearray()
        while b"\r\n\r\n" not in head:
            data = connection.recv(65536)
            if not data:
                return False
            head += data
        text, _, rest = bytes(head).partition(b"\r\n\r\n")
        lines = text.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        if headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._receive(connection, rest, int(headers.get("content-length", 0)))
        time.sleep(self.latency_s)
        status, extra, answer = self._do(method, target, headers, body)
        length = extra.pop("Content-Length", str(len(answer)))
        lines = [f"HTTP/1.1 {status} x", f"Content-Length: {length}"]
        lines += [f"{k}: {v}" for k, v in extra.items()]
        connection.sendall("\r\n".join([*lines, "\r\n"]).encode())
        self._send(connection, answer)
        return True

    def _receive(self, connection: socket.socket, rest: bytes, length: int) -> bytearray:
        body, start, at = bytearray(length), time.monotonic(), len(rest)
        body[:at] = rest
        view = memoryview(body)
        while at < length:
            at += connection.recv_into(view[at : at + PIECE])
            self._hold(at, start)
        return body

    def _send(self, connection: socket.socket, data: bytes | memoryview) -> None:
        start, view = time.monotonic(), memoryview(data)
        for at in range(0, len(view), PIECE):
            connection.sendall(view[at : at + PIECE])
            self._hold(at + PIECE, start)

    def _hold(self, done: int, start: float) -> None:
        if self.bytes_per_s:
            ahead_s = done / self.bytes_per_s - (time.monotonic() - start)
            if ahead_s > 0.002:
                time.sleep(ahead_s)

    def _do(self, method, target, headers, body):
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True)
        key = unquote(url.path)
        if method == "POST":
            return self._multipart(key, query)
        if "x-amz-copy-source" in headers:
            source = "/" + unquote(headers["x-amz-copy-source"]).lstrip("/").partition("?")[0]
            self.objects[key] = self.objects[source]
            text = f"{XML}<CopyObjectResult><ETag>0</ETag></CopyObjectResult>"
            return 200, {}, text.encode()
        if method == "PUT":
            if "partNumber" in query:
                self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            elif headers.get("if-none-match") and key in self.objects:
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            elif key.count("/") > 1:
                self.objects[key] = Whole([body])
            return 200, {"ETag": '"0"'}, b""
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b""
        if "list-type" in query or "location" in query or key.count("/") < 2:
            return self._list(key, query)
        return self._get(key, headers, is_head=method == "HEAD")

    def _multipart(self, key, query):
        if "delete" in query:
            text = f"{XML}<DeleteResult></DeleteResult>"
        elif "uploads" in query:
            upload = f"u{len(self.parts)}"
            self.parts[upload] = {}
            root = "InitiateMultipartUploadResult"
            text = f"{XML}<{root}><UploadId>{upload}</UploadId></{root}>"
        else:
            parts = self.parts.pop(query["uploadId"][0])
            self.objects[key] = Whole([parts[n] for n in sorted(parts)])
            root = "CompleteMultipartUploadResult"
            text = f"{XML}<{root}><ETag>0</ETag></{root}>"
        return 200, {}, text.encode()

    def _list(self, key, query):
        bucket = "/" + key.strip("/") + "/"
        prefix = bucket + query.get("prefix", [""])[0]
        stamp = "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>0</ETag>"
        rows = "".join(
            f"<Contents><Key>{k[len(bucket) :]}</Key><Size>{len(v)}</Size>{stamp}</Contents>"
            for k, v in sorted(self.objects.items())
            if k.startswith(prefix)
        )
        text = f"{XML}<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return 200, {}, text.encode()

    def _get(self, key, headers, *, is_head):
        data = self.objects.get(key)
        if data is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        common = {"ETag": '"0"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if is_head:  # putting its parts together would take longer than the answer
            return 200, {**common, "Content-Length": str(len(data))}, b""
        if "range" not in headers:
            return 200, {**common, "Content-Length": str(len(data))}, data.cut(0, len(data))
        first, _, last = headers["range"].removeprefix("bytes=").partition("-")
        end = min(int(last or len(data) - 1) + 1, len(data))
        span = f"bytes {first}-{end - 1}/{len(data)}"
        return 206, {**common, "Content-Range": span}, data.cut(int(first), end)


if __name__ == "__main__":
    Sink(float(sys.argv[1]), float(sys.argv[2])).serve()
