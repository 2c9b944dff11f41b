"""What a rank tells of itself when a step hangs: its flight record and the stacks of its threads.

It is asked for at the address at which it also offers its state, by manager processes that find a
step far too long. The answer comes from a thread of its own, so a main thread that waits or sleeps
does not matter; one that holds Python's lock for ever does, and its silence is evidence.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from flightrec.record import dump_bytes, is_warm, stacks_text, warm_recorder
from ftcore.heal import wire
from ftcore.heal.errors import FrameInvalid, OfferRefused
from ftcore.wire.channels import token_metadata

WANT = "flight record"
ANSWER_BYTES_MAX = 256 << 20
FRESH_S = 1.0  # one record serves all who ask within this time
WARM_AFTER_S = 10.0  # from the first commit: not while a group that came back catches up


class FlightRecord:
    """This process's flight record, for whoever asks: made once for all who ask together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken_at = float("-inf")
        self._record: tuple[bytes, bytes] = (b"", b"")
        self._timer: threading.Timer | None = None

    def warm_soon(self) -> None:
        """Have the slow part of the first dump with stacks done before it is needed."""
        if self._timer is None:
            self._timer = threading.Timer(WARM_AFTER_S, lambda: warm_recorder().join())
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take(self) -> tuple[bytes, bytes]:
        """The dump and the stacks as text. Before the recorder is warm the dump holds no stacks,
        for then they take seconds; those of the threads come in any case."""
        with self._lock:
            if time.monotonic() - self._taken_at > FRESH_S:
                stacks = stacks_text().encode()
                self._record = (dump_bytes(stacks=is_warm()), stacks)
                self._taken_at = time.monotonic()
            return self._record


def send_record(
    connection: socket.socket, record: FlightRecord | None, hello: Mapping[str, Any]
) -> None:
    """Answer one who asks for the record; with the job's token, if the job has one."""
    if not hmac.compare_digest(str(hello.get("token")).encode(), _token().encode()):
        raise OfferRefused("the token is not that of this job")
    parts = (b"", b"") if record is None else record.take()
    wire.send_frame(connection, {"bytes": [len(part) for part in parts]})
    for part in parts:
        wire.send_all(connection, part)


def fetch_record(address: str, *, timeout_s: float) -> tuple[bytes, bytes]:
    """The dump and the stacks of the rank at `address`.

    Raises SourceLost, FrameInvalid, OfferRefused or OSError.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        wire.set_timeouts(connection, receive_s=timeout_s, send_s=timeout_s)
        hello = {"ftheal": wire.VERSION, "want": WANT, "token": _token()}
        wire.send_frame(connection, hello)
        answer = wire.receive_frame(connection)
        if "refused" in answer:
            raise OfferRefused(str(answer["refused"])[:200])
        dump, stacks = (
            wire.receive_exactly(connection, size) for size in _sizes(answer.get("bytes"))
        )
        return dump, stacks


def _sizes(value: Any) -> list[int]:
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(n) is not int or not 0 <= n <= ANSWER_BYTES_MAX for n in value):
        raise FrameInvalid(f"a flight record announces {value!r:.40} bytes")
    return list(value)


def _token() -> str:
    return "".join(text for _, text in token_metadata())
