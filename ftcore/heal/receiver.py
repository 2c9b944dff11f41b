"""Receive parts from several sources over several connections, each on a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ftcore.base.errors import FtError
from ftcore.heal import wire
from ftcore.heal.errors import FrameInvalid, OfferRefused, SourceLost
from ftcore.heal.manifest import BLOCKS, Manifest, decode_manifest
from ftcore.heal.pace import Pace
from ftcore.heal.server import Offer
from ftcore.heal.sink import Sink
from ftcore.heal.work import Work

ASKED_AHEAD = 2  # requests under way on one connection: the source never waits for the next
DAMAGED_MAX = 3  # wrong checksums before a source is given up
MANIFEST_BYTES_MAX = 64 << 30
CONNECT_TIMEOUT_S = 5.0


def connect(
    offer: Offer,
    *,
    reader: str,
    silent_s: float,
    opened: Callable[[socket.socket], object] = lambda _: None,
) -> socket.socket:
    """A connection to a source that has admitted us; `opened` has it before that. Raises SourceLost
    or OfferRefused."""
    host, _, port = offer.address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
    except (OSError, ValueError) as error:
        raise SourceLost(f"{offer.address} does not answer: {error}") from error
    try:
        opened(connection)
        wire.set_timeouts(connection, receive_s=silent_s, send_s=silent_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = {"ftheal": wire.VERSION, "token": offer.token, "reader": reader}
        ask(connection, {**hello, "quorum_id": offer.quorum_id, "step": offer.step})
    except BaseException:
        connection.close()
        raise
    return connection


def ask(connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request and return the head of its answer."""
    try:
        wire.send_frame(connection, request)
    except OSError as error:
        raise SourceLost(f"the connection broke: {error.strerror}") from error
    return answer(connection)


def answer(connection: socket.socket) -> dict[str, Any]:
    head = wire.receive_frame(connection)
    if "refused" in head:
        raise OfferRefused(str(head["refused"])[:500])
    return head


def fetch_manifest(
    offer: Offer, reader: str, silent_s: float, *, opened: Callable[[socket.socket], object]
) -> tuple[Manifest, socket.socket]:
    """The manifest of a source, verified, and the connection it came by. Raises an FtError."""
    connection = connect(offer, reader=reader, silent_s=silent_s, opened=opened)
    try:
        sizes = ask(connection, {"want": "manifest"}).get("blocks")
        if not isinstance(sizes, list) or len(sizes) != BLOCKS:
            raise FrameInvalid("a manifest has the wrong number of blocks")
        if not all(type(n) is int and n >= 0 for n in sizes) or sum(sizes) > MANIFEST_BYTES_MAX:
            raise FrameInvalid("a manifest announces an impossible size")
        blocks = _allocate(sizes)
        checksum = wire.receive_into(connection, [memoryview(b) for b in blocks if b], sum(sizes))
        if checksum != wire.receive_checksum(connection):
            raise SourceLost(f"the manifest of {offer.address} arrived damaged")
        return decode_manifest(blocks), connection
    except BaseException:
        connection.close()
        raise


def _allocate(sizes: Sequence[int]) -> list[bytearray]:
    try:
        return [bytearray(size) for size in sizes]
    except MemoryError as error:
        raise FrameInvalid(f"there is no memory for a manifest of {sum(sizes)} bytes") from error


@dataclass(slots=True)
class SourceState:
    """One source, over all its connections."""

    offer: Offer
    connections: int
    bytes: int = 0
    damaged: int = 0
    lost: str | None = None  # why a connection of it ended, if one did


class Receiver:
    """`with Receiver(…) as receiver:` starts the threads; leaving ends and joins them."""

    def __init__(
        self,
        offers: Sequence[Offer],
        sink: Sink,
        pace: Pace,
        reader: str,
        connections: int,
        silent_s: float,
    ) -> None:
        self.sources = [SourceState(offer, connections) for offer in offers]
        self._sink, self._pace, self._silent_s = sink, pace, silent_s
        self._work = Work(len(sink.parts), sink.parts_done)
        self._changed = threading.Condition()
        self._is_over = False
        self._over = threading.Event()
        self._reader = reader
        self._sockets: dict[int, socket.socket] = {}
        self._torn_sources: set[int] = set()
        self._threads = [
            threading.Thread(target=self._run, args=(source + k * len(offers), source), daemon=True)
            for k in range(connections)
            for source in range(len(offers))
        ]

    def __enter__(self) -> Receiver:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_over = True
            self._over.set()
            self._changed.notify_all()
            if not self._work.is_finished:
                for connection in self._sockets.values():
                    wire.shut(connection)
        for thread in self._threads:
            thread.join()

    # The calling thread.

    def wait(self, seconds: float) -> bool:
        """True once all parts have arrived and their sources said that they were intact."""
        with self._changed:
            self._changed.wait_for(self._is_settled, timeout=seconds)
            return self._is_settled() and self._work.is_finished and not self._torn_sources

    def why_hopeless(self) -> str | None:
        """A sentence when no source can bring the missing parts, else None."""
        with self._changed:
            if self._torn_sources:
                places = ", ".join(self.sources[s].offer.address for s in self._torn_sources)
                return f"the state was changed while {places} served it"
            living = [i for i, s in enumerate(self.sources) if s.connections]
            if self._work.is_finished or (living and not self._work.is_hopeless(living)):
                return None
            reasons = [f"{s.offer.address}: {s.lost or 'has dropped it'}" for s in self.sources]
            return "; ".join(reasons)

    def cut_late(self) -> None:
        """Take parts from connections that hold up the end, if other sources can bring them."""
        with self._changed:
            if sum(1 for s in self.sources if s.connections) < 2:
                return
            for connection in self._work.late(time.monotonic()):
                if connection in self._sockets:
                    wire.shut(self._sockets[connection])

    def _is_settled(self) -> bool:
        return (self._work.is_finished and not any(s.connections for s in self.sources)) or bool(
            self._torn_sources
        )

    # One thread for each connection.

    def _run(self, number: int, source: int) -> None:
        state = self.sources[source]
        asked: deque[int] = deque()
        why: str | None = None
        try:
            with connect(state.offer, reader=self._reader, silent_s=self._silent_s) as connection:
                with self._changed:
                    self._sockets[number] = connection
                self._receive_all(connection, number, source, asked)
        except (FtError, OSError) as error:
            why = str(error)
        finally:
            with self._changed:
                self._sockets.pop(number, None)
                self._work.give_back(asked)
                state.connections -= 1
                if not self._work.is_finished:
                    state.lost = why
                self._changed.notify_all()

    def _receive_all(
        self, connection: socket.socket, number: int, source: int, asked: deque[int]
    ) -> None:
        while self._ask_ahead(connection, number, source, asked):
            self._receive(connection, source, asked)
        head = ask(connection, {"want": "end", "done": self._work.is_finished})
        if head.get("intact") is not True:
            with self._changed:
                self._torn_sources.add(source)

    def _ask_ahead(
        self, connection: socket.socket, number: int, source: int, asked: deque[int]
    ) -> bool:
        """Keep requests under way; wait when there is nothing to ask. False: all is there."""
        while True:
            with self._changed:
                if self._is_over or self.sources[source].damaged >= DAMAGED_MAX:
                    break
                part = self._work.take(number, source, time.monotonic())
                if part is None and not asked:
                    if self._work.is_finished:
                        return False
                    self._changed.wait()
                    continue
                if part is not None:
                    asked.append(part)
                    have = f"{self._work.done:x}"
                    pause = self._pace.delay(self._sink.parts[part].nbytes, time.monotonic())
            if part is None:
                return True
            self._over.wait(pause)
            wire.send_frame(connection, {"want": "part", "part": part, "have": have})
            if len(asked) >= ASKED_AHEAD:
                return True
        raise SourceLost("it sent damaged bytes" if not self._is_over else "the heal is over")

    def _receive(self, connection: socket.socket, source: int, asked: deque[int]) -> None:
        index = asked[0]
        part = self._sink.parts[index]
        head = answer(connection)
        if head.get("gone") == index:
            asked.popleft()
            with self._changed:
                self._work.lack(index, source)
                self._changed.notify_all()
            return
        if head != {"part": index, "bytes": part.nbytes}:
            raise FrameInvalid(f"part {index} was asked for, the answer is {head!r:.80}")
        checksum = wire.receive_into(connection, self._sink.views(part), part.nbytes)
        is_right = checksum == wire.receive_checksum(connection)
        asked.popleft()
        with self._changed:
            if is_right:
                self._work.finish(index, time.monotonic())
                self._sink.done(part)
                self.sources[source].bytes += part.nbytes
            else:
                self._work.give_back([index])
                self.sources[source].damaged += 1
            self._changed.notify_all()
