"""Keep copies of staged steps in the memory of other hosts' daemons, and hand them out again.

A daemon pushes a sealed step to the daemons that its trainers named, and answers theirs. Whoever
asks must know a token that the trainers of a run have in common.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.daemon.memory import Held, MemoryTier, Slot
from ckpt.hashing import chunk_digests
from ckpt.plan import layout_from_json, layout_to_json
from ckpt.region import Region
from ckpt.wire import Channel, Message
from ftcore.base.log import event

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0


class Ring:
    """The listener, and the tokens that are good here."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._tokens: dict[str, set[str]] = {}
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()

    def listen(self, host: str, port: int) -> str:
        """Begin to answer; return `HOST:PORT` as others should call it."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server((host, port))
                threading.Thread(target=self._accept, name="ckpt-ring", daemon=True).start()
            bound, number = self._listener.getsockname()[:2]
        return f"{socket.gethostname() if bound == '0.0.0.0' else bound}:{number}"

    def allow(self, run: str, token: str) -> None:
        """Let whoever knows `token` keep and read steps of `run` here."""
        with self._lock:
            self._tokens.setdefault(run, set()).add(token)

    def _is_allowed(self, message: Message) -> bool:
        with self._lock:
            known = self._tokens.get(message.get("run", ""), set())
        given = str(message.get("token", ""))
        return any(hmac.compare_digest(given, token) for token in known)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        channel = Channel(connection)
        try:
            while (received := channel.receive()) is not None:
                message = received[0]
                if not self._is_allowed(message):
                    channel.send({"kind": "refused"})
                    return
                self._answer(channel, message)
        except Exception as error:
            event(log, "ring.broke", level=logging.WARNING, error=str(error))
        finally:
            channel.close()

    def _answer(self, channel: Channel, message: Message) -> None:
        if message["kind"] == "keep":
            self._keep(channel, message)
        elif message["kind"] == "list":
            slots = [s for s in self._memory.slots(message["run"]) if s.held is not None]
            rows = [held_to_json(s.held, s) for s in slots if s.held is not None]
            channel.send({"kind": "held", "held": rows})
        elif message["kind"] == "get":
            self._give(channel, message)

    def _keep(self, channel: Channel, message: Message) -> None:
        """Take a copy. The older copy of the same participant stays until this one is whole."""
        held = held_from_json(message["held"])
        numbers = (0, 1)
        seat = f"copy of {held.index}"
        old = {s.number: s for s in self._memory.slots(held.run, seat)}
        used = [n for n in numbers if n in old and old[n].held is not None]
        number = next(n for n in numbers if n not in used[-1:])
        slot = old.get(number)
        if slot is None or slot.region.size < message["size"]:
            slot = Slot(held.run, seat, number, Region.create(message["size"]))
            self._memory.put(slot)
        slot.held = None
        channel.receive_into(slot.region.view[: message["size"]])
        for offset, file, digests in zip(
            held.layout.pool_offsets, held.layout.files, held.digests, strict=True
        ):
            if chunk_digests(slot.region.view[offset : offset + file.size]) != digests:
                channel.send({"kind": "damaged"})
                return
        slot.held = held
        for other in used:
            old[other].held = None
        channel.send({"kind": "kept"})

    def _give(self, channel: Channel, message: Message) -> None:
        wanted = (message["index"], message["step"], message["attempt"])
        for slot in self._memory.slots(message["run"]):
            held = slot.held
            if held is not None and (held.index, held.step, held.attempt) == wanted:
                start, end = message["start"], message["end"]
                channel.send_bytes({"kind": "bytes"}, slot.region.view[start:end])
                return
        channel.send({"kind": "gone"})


def push(address: str, token: str, held: Held, region: Region) -> None:
    """Have the daemon at `address` keep a copy of a sealed step."""
    size = held.layout.pool_bytes
    with connected(address) as channel:
        head = {"kind": "keep", "run": held.run, "token": token, "size": size}
        channel.send_bytes({**head, "held": held_to_json(held, None)}, region.view[:size])
        answer = channel.receive()
    if answer is None or answer[0]["kind"] != "kept":
        raise ConnectionError(f"{address} did not keep the copy: {answer and answer[0]['kind']}")


@contextmanager
def connected(address: str) -> Iterator[Channel]:
    """A channel to another daemon, with a deadline on every message."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    channel = Channel(sock)
    try:
        yield channel
    finally:
        channel.close()


def held_to_json(held: Held, slot: Slot | None) -> Message:
    return {
        "run": held.run,
        "step": held.step,
        "attempt": held.attempt,
        "index": held.index,
        "count": held.count,
        "layout": layout_to_json(held.layout),
        "plain": held.plain,
        "metrics": held.metrics,
        "digests": [d.hex() for d in held.digests],
        "size": slot.region.size if slot is not None else 0,
    }


def held_from_json(content: dict[str, Any]) -> Held:
    return Held(
        run=content["run"],
        step=content["step"],
        attempt=content["attempt"],
        index=content["index"],
        count=content["count"],
        layout=layout_from_json(content["layout"]),
        plain=content["plain"],
        metrics=content["metrics"],
        digests=tuple(bytes.fromhex(d) for d in content["digests"]),
    )
