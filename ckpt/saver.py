"""Run saves: wait for a slot, copy, tell the daemon, and keep what a new daemon must be told."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.capture import Captured
from ckpt.client import Client
from ckpt.daemon.orders import Order
from ckpt.errors import CheckpointError, DaemonGone, SaveFailed, SaveSkipped, StagingTorn
from ckpt.handle import Durable, SaveHandle
from ckpt.plan import FilePlan, Layout, is_owner, layout_to_json
from ckpt.progress import ProgressLine, size_text
from ckpt.region import Region
from ckpt.slots import Resident, Slot, Slots, Wave, cell_bytes
from ckpt.staging import Copier, Gate, Versions, write_header
from ckpt.staging_cuda import Snapshot
from ckpt.wire import Message
from ftcore.base.log import event

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saving:
    """One save from call to the last destination."""

    order: Order
    handle: SaveHandle
    layout: Layout
    captured: Captured | None
    versions: Versions | None
    is_begun: bool = False  # the daemon was told, so a new one must be told too
    staged: list[tuple[int, int]] = field(default_factory=list)
    plain: str | None = None
    cancelled: str = ""
    wave: Wave | None = None
    snapshot: Snapshot | None = None
    ready: Any = None  # on a device: the moment after which the state may be read
    seconds: float = 0.0

    def messages(self) -> list[Message]:
        """All that a daemon has to know of this save."""
        save_id = self.order.save_id
        order = {**self.order.to_json(), "durable_at": list(self.handle.durable_at)}
        found: list[Message] = [{"kind": "save", "order": order}]
        found += [
            {"kind": "staged", "save_id": save_id, "file": n, "offset": o} for n, o in self.staged
        ]
        if self.plain is not None:
            found.append(self.sealed())
        return found

    def sealed(self) -> Message:
        return {
            "kind": "sealed",
            "save_id": self.order.save_id,
            "plain": self.plain,
            "seconds": self.seconds,
        }


class Saver:
    """Owns the staging thread, the slots and the saves in flight."""

    def __init__(self, gate: Gate, slots_count: int, staging_bytes_max: int | None) -> None:
        self.client: Client | None = None
        self._gate = gate
        self._copier = Copier(lambda: gate.is_awaited)
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self._savings: dict[int, Saving] = {}
        self._layouts: dict[str, Layout] = {}
        self._queue: queue.SimpleQueue[Saving | Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._gone: str = ""
        self.progress = ProgressLine(show=False)
        self.ring: Message | None = None  # who keeps copies of our memory
        self.slots = Slots(
            slots_count, staging_bytes_max, on_region=self._announce, on_drop=self._copier.forget
        )
        self._thread = threading.Thread(target=self._run, name="ckpt-stage", daemon=True)

    def start(self, client: Client) -> None:
        self.client = client
        self._thread.start()

    def submit(self, saving: Saving) -> None:
        """Queue a save. Optimizers wait from here on until it is staged."""
        with self._lock:
            if self._gone:
                raise DaemonGone(self._gone)
            self._savings[saving.order.save_id] = saving
        self._take_from_device(saving)
        self._gate.enter(holds=saving.versions is not None)
        self._queue.put(saving)

    def _take_from_device(self, saving: Saving) -> None:
        """With a snapshot nothing has to wait: the state is ours already. Runs on the training
        thread, because the copy must stand in its stream before the next optimizer step."""
        captured = saving.captured
        if captured is None or not any(t.is_cuda for t in captured.tensors):
            return
        saving.ready = torch.cuda.Event()
        saving.ready.record()
        if self.slots.slot_bytes_max is None:
            saving.captured, saving.snapshot = self._copier.cuda.snapshot(captured)
        if saving.snapshot is not None and len(saving.snapshot.starts) == len(saving.layout.files):
            saving.versions = None

    def submit_call(self, call: Callable[[], None]) -> None:
        """Run `call` on the staging thread, between saves."""
        self._queue.put(call)

    def cancel_waiting(self, reason: str) -> None:
        """Take back sealed saves that no destination has begun to write."""
        with self._lock:
            waiting = [s for s in self._savings.values() if s.plain is not None]
        for saving in waiting:
            self._post(
                {"kind": "cancel", "save_id": saving.order.save_id, "reason": reason, "if": "idle"}
            )

    def drain(self, timeout_s: float | None) -> None:
        """Wait until no save is in flight any more."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            handles = [s.handle for s in self._savings.values()]

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        for handle in handles:
            try:
                handle.wait_durable(left())
            except CheckpointError as error:
                event(log, "save.lost", level=logging.WARNING, step=handle.step, error=str(error))
        with self._ended:  # retention runs after the commit
            self._ended.wait_for(lambda: self._gone or not self._savings, left())

    def wait_staged(self) -> None:
        """Wait until all that was submitted is staged or dropped."""
        with self._lock:
            handles = [s.handle for s in self._savings.values()]
        for handle in handles:
            with contextlib.suppress(CheckpointError):
                handle.wait_staged()

    def close(self) -> None:
        self._is_closed = True
        self.slots.wake()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._copier.close()
        self.slots.close()

    # --- the staging thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not isinstance(work, Saving):
                work()
                continue
            try:
                self._stage(work)
            except Exception as error:
                self._drop(work, error)
            finally:
                if work.snapshot is not None:
                    self._copier.cuda.give_back()
                self._gate.leave(held=work.versions is not None)
                work.captured, work.versions, work.snapshot = None, None, None

    def _stage(self, saving: Saving) -> None:
        """Copy everything, check that nothing changed meanwhile, and seal."""
        slot = self.slots.acquire(saving.order.save_id, stop=lambda: self._is_closed)
        if slot is None:
            raise SaveSkipped(f"step {saving.order.step}: the checkpointer was closed")
        started = time.perf_counter()
        sink = self._prepare(saving, slot)
        self._begin(saving, slot)
        assert saving.captured is not None
        taken = {} if saving.snapshot is None else saving.snapshot.starts
        files = [n for n, file in enumerate(saving.layout.files) if self._is_ours(saving, file)]
        self._copy_live(saving, sink, [n for n in files if n not in taken])
        for number in files:
            if number in taken:
                self._staged(saving, number, self._copy(saving, sink, number))
        saving.seconds = time.perf_counter() - started
        self._seal(saving, saving.captured.plain.decode("utf-8", "surrogatepass"))

    def _is_ours(self, saving: Saving, file: FilePlan) -> bool:
        """In a wave a replica writes the rest, for a wave keeps nothing for taking over."""
        return saving.wave is None or is_owner(file, saving.order.copies)

    def _copy_live(self, saving: Saving, sink: Resident | Wave, files: Sequence[int]) -> None:
        """Copy what optimizers may not change meanwhile, check that nothing changed, let them go
        on. Where all that is left is up to a device, they go on before it has ended there."""
        copied: list[tuple[int, int]] = []
        for number in files:
            copied.append((number, self._copy(saving, sink, number)))
            if saving.ready is None or saving.wave is not None:
                self._copier.cuda.finish()
                self._staged(saving, *copied.pop())
        if saving.versions is not None:
            assert saving.captured is not None
            saving.versions.check(saving.captured.names)
            self._gate.leave_behind(self._copier.cuda.moments())
            saving.versions = None
        self._copier.cuda.finish()
        for number, offset in copied:
            self._staged(saving, number, offset)

    def _copy(self, saving: Saving, sink: Resident | Wave, number: int) -> int:
        """Copy one file into staging memory; return its offset there."""
        assert saving.captured is not None
        file = saving.layout.files[number]
        region, offset = sink.begin(number, file.size)
        if saving.wave is not None:
            write_header(file, region, offset)
        self._copier.copy(
            number,
            saving.captured,
            region,
            offset,
            snapshot=saving.snapshot,
            ready=saving.ready,
        )
        return offset

    def _prepare(self, saving: Saving, slot: Slot) -> Resident | Wave:
        layout, budget = saving.layout, self.slots.slot_bytes_max
        if budget is not None and layout.pool_bytes > budget:
            region = self.slots.fit(slot, cell_bytes(budget) * 2)
            region = self.slots.fit(slot, budget)
            saving.wave = Wave(region, cell_bytes(budget))
            slot.headers = ""
            return saving.wave
        region = self.slots.fit(slot, layout.pool_bytes)
        if saving.ready is not None:
            self._copier.cuda.register(region)
        if slot.headers != layout.digest:
            write_headers_of(layout, region)
            slot.headers = layout.digest
        return Resident(layout, region)

    def rehearse(self, captured: Captured) -> None:
        """Take a snapshot that nobody reads: the device loads its kernels and finds the memory.
        Runs on the training thread."""
        is_on_device = any(t.is_cuda for t in captured.tensors)
        if is_on_device and self.slots.slot_bytes_max is None:
            _, snapshot = self._copier.cuda.snapshot(captured)
            if snapshot is not None:
                self._copier.cuda.give_back()

    def prefault(self, layout: Layout, *, is_on_device: bool) -> None:
        """Make the memory for `layout` ready, so that the first save costs what later ones do."""
        budget = self.slots.slot_bytes_max
        size = layout.pool_bytes if budget is None else min(layout.pool_bytes, budget)
        slot = self.slots.acquire(-1, stop=lambda: True)
        if slot is not None:
            region = self.slots.fit(slot, size)
            if is_on_device:
                self._copier.cuda.register(region)
            self.slots.release(slot.number, -1)

    def _begin(self, saving: Saving, slot: Slot) -> None:
        with self._atomic():
            order = {**saving.order.to_json(), "slot": slot.number}
            order["resident"] = saving.wave is None
            saving.order = Order.from_json(order)
            if saving.layout.digest not in self._layouts:
                self._layouts[saving.layout.digest] = saving.layout
                self._post({"kind": "layout", "layout": layout_to_json(saving.layout)})
            saving.is_begun = True
            self._post({"kind": "save", "order": saving.order.to_json()})

    def _staged(self, saving: Saving, number: int, offset: int) -> None:
        with self._atomic():
            saving.staged.append((number, offset))
            self._post(
                {
                    "kind": "staged",
                    "save_id": saving.order.save_id,
                    "file": number,
                    "offset": offset,
                }
            )

    def _seal(self, saving: Saving, plain: str) -> None:
        with self._atomic():
            saving.plain = plain
            self._post(saving.sealed())
        saving.handle.set_staged()
        event(
            log,
            "save.staged",
            level=logging.DEBUG,
            step=saving.order.step,
            bytes=saving.layout.data_bytes,
            seconds=saving.seconds,
        )

    def _drop(self, saving: Saving, error: Exception) -> None:
        """A save that could not be staged: nothing of it stays for the next one."""
        if not isinstance(error, CheckpointError):
            log.warning("save.dropped", exc_info=error)
            error = SaveFailed(f"step {saving.order.step}: {type(error).__name__}: {error}")
        saving.handle.fail(error)
        with self._atomic():
            self._post({"kind": "cancel", "save_id": saving.order.save_id, "reason": str(error)})
            with self._lock:
                self._savings.pop(saving.order.save_id, None)
                self._ended.notify_all()
        if not saving.staged and isinstance(error, StagingTorn | SaveFailed):
            self.slots.release(saving.order.slot, saving.order.save_id)

    # --- talking to the daemon ------------------------------------------------------------------

    def _atomic(self) -> AbstractContextManager[None]:
        assert self.client is not None
        return self.client.atomic()

    def _post(self, message: Message, fds: Sequence[int] = ()) -> None:
        assert self.client is not None
        self.client.post(message, fds)

    def _announce(self, slot: Slot) -> None:
        assert slot.region is not None
        with self._atomic():
            self._post(region_message(slot), [slot.region.fd])

    def replay(self, send: Callable[[Message, Sequence[int]], None]) -> None:
        """Tell a new daemon of our memory and of every save that is not settled."""
        for slot in self.slots.regions():
            assert slot.region is not None
            send(region_message(slot), [slot.region.fd])
        for layout in self._layouts.values():
            send({"kind": "layout", "layout": layout_to_json(layout)}, [])
        with self._lock:
            self._stop_waves()
            savings = [s for s in self._savings.values() if s.is_begun]
            self.slots.release_except(set(self._savings))
        if self.ring is not None:
            send({**self.ring, "ask": 0}, [])
        for saving in savings:
            for message in saving.messages():
                send(message, [])

    def _stop_waves(self) -> None:
        """A save in waves cannot be told again: its first files are overwritten by now."""
        for saving in list(self._savings.values()):
            if saving.wave is not None and not saving.handle.is_settled:
                reason = "the daemon died while the state was copied to it in waves"
                saving.handle.fail(SaveFailed(f"step {saving.order.step}: {reason}"))
                saving.wave.stop()
                del self._savings[saving.order.save_id]

    def take(self, message: Message, fds: list[int]) -> None:
        """Act on what the daemon says."""
        for fd in fds:
            os.close(fd)
        saving = self._savings.get(message.get("save_id", 0))
        kind = message["kind"]
        if kind == "free":
            self.slots.release(message["slot"], message["save_id"])
            self._forget(message["save_id"])
        elif kind == "ring":
            return
        elif kind == "gone":
            self._lose_daemon(message["error"])
        elif saving is None:
            return
        elif kind == "durable":
            facts = {k: message[k] for k in ("url", "bytes", "seconds")}
            saving.handle.set_durable(Durable(**facts))
            self.progress.say(durable_text(saving.order.step, facts))
        elif kind == "failed":
            saving.handle.set_failed(message["url"], failure(saving.order.step, message))
        elif kind == "written" and saving.wave is not None:
            saving.wave.written(message["file"])

    def _forget(self, save_id: int) -> None:
        with self._lock:
            saving = self._savings.pop(save_id, None)
            self._ended.notify_all()
        if saving is not None and not saving.handle.is_settled:
            saving.handle.fail(SaveFailed(f"step {saving.order.step} ended without an answer"))

    def _lose_daemon(self, reason: str) -> None:
        with self._lock:
            self._gone = reason
            lost = list(self._savings.values())
            self._savings.clear()
            self._ended.notify_all()
        for saving in lost:
            saving.handle.fail(DaemonGone(reason))
            if saving.wave is not None:
                saving.wave.stop()
            self.slots.release(saving.order.slot, saving.order.save_id)


def durable_text(step: int, facts: Mapping[str, Any]) -> str:
    rate = size_text(facts["bytes"] / max(facts["seconds"], 1e-9))
    size = size_text(facts["bytes"])
    return f"step {step}: {size} at {facts['url']} in {facts['seconds']:.2f} s ({rate}/s)"


def write_headers_of(layout: Layout, region: Region) -> None:
    for file, offset in zip(layout.files, layout.pool_offsets, strict=True):
        write_header(file, region, offset)


def region_message(slot: Slot) -> Message:
    assert slot.region is not None
    return {"kind": "region", "slot": slot.number, "size": slot.region.size}


def failure(step: int, message: Message) -> CheckpointError:
    """The error that a destination reported, of our own class where we have it."""
    import ckpt.errors as errors

    text = f"step {step} at {message['url']}: {message['error']}"
    kind: Any = getattr(errors, message["kind_of_error"], SaveFailed)
    error: CheckpointError = kind(text, remedy=message["remedy"], url=message["url"])
    return error
