"""Serve the state of this rank to joiners, from threads that only ever read snapshots."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any

import xxhash

from ftcore import flight
from ftcore.base.log import event
from ftcore.heal import wire
from ftcore.heal.compare import send_layout
from ftcore.heal.errors import FrameInvalid, OfferRefused, SourceLost
from ftcore.heal.pace import Pace
from ftcore.heal.snapshot import Reader, Snapshot
from ftcore.heal.staging import Staging
from ftcore.statedict import Layout, NotAtStepBoundary, flatten

log = logging.getLogger(__name__)

SEND_HOLD_S = 0.02  # how long a reader that takes nothing can keep `gate` from a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Where and as what a state can be had. Small: it travels with the quorum."""

    address: str  # host:port
    token: str
    step: int
    quorum_id: int
    layout_hash: int
    state_id: str = ""  # equal for all states that are equal; "" when nothing is known

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(message: Mapping[str, Any]) -> Offer:
        """The inverse of `to_json`; any other message raises FrameInvalid."""
        kinds = {"address": str, "token": str, "step": int, "quorum_id": int, "layout_hash": int}
        kinds["state_id"] = str
        if any(type(message.get(key)) is not kind for key, kind in kinds.items()):
            raise FrameInvalid(f"this is not an offer of a heal source: {message!r:.100}")
        return Offer(**{key: message[key] for key in kinds})


class HealServer:
    """Publishes one snapshot at a time. Only the training thread calls `publish` and `gate`.

    `with HealServer() as server:` binds `host` and a free port. `bandwidth_max` limits what all
    readers together get, in bytes a second. A reader that takes nothing for `reader_timeout_s` is
    dropped. `stage_ahead` copies in the background between `publish` and `gate`; the default does
    so where there are four cores or more. `keep_staging` keeps the memory of copies (at most the
    size of parameters and optimizer state) for the next heal.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        advertise: str | None = None,
        bandwidth_max: float | None = None,
        reader_timeout_s: float = 30.0,
        connections_max: int = 256,
        stage_ahead: bool | None = None,
        keep_staging: bool = True,
    ) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        bound = self._listener.getsockname()[1]
        self.address = f"{advertise or host}:{bound}"
        cores = os.cpu_count() or 1
        self._stage_ahead = cores >= 4 if stage_ahead is None else stage_ahead
        self._copy_threads = min(4, cores)
        self.layout: Layout | None = None  # what others may compare theirs with
        self.record: flight.FlightRecord | None = None  # for managers that find a step too long
        self._token = secrets.token_urlsafe(18)
        self._pace = Pace(bandwidth_max)
        self._reader_timeout_s, self._connections_max = reader_timeout_s, connections_max
        self._idle_timeout_s = 10 * reader_timeout_s  # between requests a reader may be busy
        self._staging, self._keep_staging = Staging(), keep_staging
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._training_thread: int | None = None
        self._accepter = threading.Thread(target=self._accept, name="ft-heal", daemon=True)
        self._accepter.start()

    # The training thread.

    def publish(
        self, state: object, *, step: int, quorum_id: int, readers: int = 1, state_id: str = ""
    ) -> Offer:
        """Offer `state` as it is now to `readers` joiners; the offer before is over.

        Sources that give the same `state_id` hold the same parameters and optimizer state.
        Copies what may change before the next optimizer step and nothing else. Call `gate` before
        that step, and `retire` when the quorum says that the heal is over.
        """
        self._assert_training_thread()
        self.retire()
        started = time.perf_counter()
        flat = flatten(state)
        snapshot = Snapshot(
            flat,
            self._staging,
            step=step,
            quorum_id=quorum_id,
            readers=readers,
            stage_ahead=self._stage_ahead,
        )
        with self._lock:
            self._snapshot = snapshot
        event(
            log,
            "heal.published",
            step=step,
            quorum_id=quorum_id,
            bytes=flat.layout.nbytes,
            seconds=round(time.perf_counter() - started, 6),
        )
        return Offer(
            address=self.address,
            token=self._token,
            step=step,
            quorum_id=quorum_id,
            layout_hash=flat.layout.hash,
            state_id=state_id,
        )

    def prefault(self, state: object) -> None:
        """Touch the memory that a copy of `state` takes, in the background. Once, after the first
        step: then even the first heal finds its staging memory ready."""
        self._assert_training_thread()
        if self._snapshot is None:
            self._staging.prefault(flatten(state).layout.nbytes)

    def gate(self) -> float:
        """Make it safe to change the published state; return the seconds this took.

        Call it before each optimizer step. Free when nothing is published or all is settled.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot.is_settled:
            return 0.0
        self._assert_training_thread()
        started = time.perf_counter()
        copied = snapshot.settle(threads=self._copy_threads)
        seconds = time.perf_counter() - started
        event(log, "heal.settled", step=snapshot.step, copied_bytes=copied, seconds=seconds)
        return seconds

    def retire(self) -> None:
        """Stop serving what is published. Its readers are refused from now on."""
        with self._lock:
            snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.revoke()
            if not self._keep_staging:
                self._staging.release()

    def is_wanted(self) -> bool:
        """True while an expected joiner has not come or not finished: keep serving."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.is_wanted()

    def wait_served(self, timeout_s: float) -> bool:
        """Wait until no joiner wants anything any more; False when the time ran out."""
        snapshot = self._snapshot
        return snapshot is None or snapshot.wait_served(timeout_s)

    def close(self) -> None:
        """Stop serving, end all connections and join all threads."""
        self.retire()
        self._staging.release()
        self._closed.set()
        wire.shut(self._listener)
        self._listener.close()
        self._accepter.join()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            wire.shut(connection)
        for thread in connections.values():
            thread.join()

    def __enter__(self) -> HealServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _assert_training_thread(self) -> None:
        """The first thread that publishes is the training thread, and the only one from then on."""
        current = threading.get_ident()
        if self._training_thread not in (None, current):
            raise NotAtStepBoundary("the state was published or gated from two different threads")
        self._training_thread = current

    # Threads of the server.

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed.wait(0.05):  # closed, or out of file descriptors for a moment
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                crowded = len(self._connections) >= self._connections_max
                if not crowded:
                    self._connections[connection] = thread
                    thread.start()
            if crowded:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            wire.set_timeouts(connection, receive_s=self._idle_timeout_s, send_s=SEND_HOLD_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._talk(connection)
        except OfferRefused as error:
            _try_send(connection, {"refused": str(error)})
            event(log, "heal.reader_refused", what=str(error))
        except (SourceLost, FrameInvalid, OSError) as error:
            event(log, "heal.reader_lost", what=str(error))
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _talk(self, connection: socket.socket) -> None:
        hello = wire.receive_frame(connection)
        if hello.get("want") == "layout":
            send_layout(connection, self.layout)
            return
        if hello.get("want") == flight.WANT:
            flight.send_record(connection, self.record, hello)
            return
        snapshot = self._admit(hello)
        wire.send_frame(connection, {"ok": True})
        with snapshot.connected(str(hello.get("reader"))[:100]) as reader:
            while True:
                request = wire.receive_frame(connection)
                self._answer(connection, snapshot, reader, request)
                if request.get("want") == "end":
                    return

    def _admit(self, hello: Mapping[str, Any]) -> Snapshot:
        if hello.get("ftheal") != wire.VERSION:
            raise OfferRefused(
                f"this source speaks version {wire.VERSION}, the reader {hello.get('ftheal')!r:.20}"
            )
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            raise OfferRefused("the token is not that of this source")
        return self._current(hello.get("quorum_id"), hello.get("step"))

    def _current(self, quorum_id: object, step: object) -> Snapshot:
        snapshot = self._snapshot
        if snapshot is None:
            raise OfferRefused(f"step {step!r:.20} of quorum {quorum_id!r:.20} is no longer served")
        if (snapshot.quorum_id, snapshot.step) != (quorum_id, step):
            raise OfferRefused(
                f"step {step!r:.20} of quorum {quorum_id!r:.20} is asked for, step {snapshot.step} "
                f"of quorum {snapshot.quorum_id} is served"
            )
        return snapshot

    def _answer(
        self, connection: socket.socket, snapshot: Snapshot, reader: Reader, request: dict[str, Any]
    ) -> None:
        self._current(snapshot.quorum_id, snapshot.step)
        match request.get("want"):
            case "manifest":
                _send_manifest(connection, snapshot.manifest, self._reader_timeout_s)
            case "part":
                reader.have |= _mask(request.get("have"), len(snapshot.parts))
                self._send_part(connection, snapshot, _index(request, len(snapshot.parts)))
            case "end":
                reader.is_done = reader.is_done or request.get("done") is True
                wire.send_frame(connection, {"intact": snapshot.is_intact()})
            case other:
                raise FrameInvalid(f"a reader wants {other!r:.40}")

    def _send_part(self, connection: socket.socket, snapshot: Snapshot, index: int) -> None:
        size = snapshot.parts[index].nbytes
        if snapshot.read(index, lambda views: 0) is None:
            wire.send_frame(connection, {"gone": index})
            return
        wire.send_frame(connection, {"part": index, "bytes": size})
        checksum = xxhash.xxh3_64()
        sent, moved_at = 0, time.monotonic()
        while sent < size:
            send = partial(wire.send_some, connection, start=sent, checksum=checksum)
            count = snapshot.read(index, send)
            if count is None:
                raise SourceLost(f"part {index} was retired while it was sent")
            moved_at = self._assert_moving(count, moved_at)
            sent += count
            if pause := self._pause(count):
                self._closed.wait(pause)
        wire.send_checksum(connection, checksum.intdigest())

    def _assert_moving(self, count: int, moved_at: float) -> float:
        now = time.monotonic()
        if count:
            return now
        if now - moved_at > self._reader_timeout_s or self._closed.is_set():
            raise SourceLost(f"the reader took nothing for {now - moved_at:.1f} s")
        return moved_at

    def _pause(self, count: int) -> float:
        with self._lock:
            return self._pace.delay(count, time.monotonic())


def _send_manifest(connection: socket.socket, blocks: Sequence[bytes], silent_s: float) -> None:
    wire.send_frame(connection, {"blocks": [len(block) for block in blocks]})
    checksum = xxhash.xxh3_64()
    for block in blocks:
        wire.send_all(connection, block, silent_s=silent_s)
        checksum.update(block)
    wire.send_checksum(connection, checksum.intdigest())


def _index(request: Mapping[str, Any], count: int) -> int:
    index = request.get("part")
    if type(index) is not int or not 0 <= index < count:
        raise FrameInvalid(f"there is no part {index!r:.40}")
    return index


def _mask(text: object, count: int) -> int:
    try:
        mask = int(str(text), 16)
    except ValueError as error:
        raise FrameInvalid("the list of parts that a reader has is not hexadecimal") from error
    if not 0 <= mask < 1 << count:
        raise FrameInvalid("a reader has parts that do not exist")
    return mask


def _try_send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        wire.send_frame(connection, message)
    except OSError:
        pass  # the reader has gone: nobody is left to be told
