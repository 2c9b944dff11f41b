"""One trainer's connection to the daemon: its messages, acted on in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt.daemon.host import Host
from ckpt.daemon.jobs import Job
from ckpt.daemon.memory import Held, Slot
from ckpt.daemon.orders import Hello, Order
from ckpt.daemon.ring import held_to_json
from ckpt.plan import Layout, layout_from_json
from ckpt.region import Region
from ckpt.wire import PROTOCOL, Channel, Message
from ftcore.base.log import event

log = logging.getLogger(__name__)


class Session:
    """Lives as long as the connection. Its sealed saves outlive it."""

    def __init__(self, channel: Channel, host: Host) -> None:
        self._channel, self._host = channel, host
        self._hello: Hello | None = None
        self._layouts: dict[str, Layout] = {}
        self._jobs: dict[int, Job] = {}
        self._slots: dict[int, Slot] = {}
        self._clean = False
        self._copies: tuple[str, ...] = ()
        self._token = ""
        self._gone = threading.Event()

    def run(self) -> None:
        """Serve until the trainer is gone; then take back what it had not staged."""
        try:
            while (received := self._channel.receive()) is not None:
                message, fds = received
                self._handlers[message["kind"]](self, message, fds)
        except Exception:
            log.exception("session.broke")
        finally:
            self._gone.set()
            self._leave()
            self._channel.close()

    def notify(self, kind: str, **facts: Any) -> None:
        """Tell the trainer. If it is gone, nobody needs to know."""
        if self._gone.is_set():
            return
        try:
            self._channel.send({"kind": kind, **facts})
        except OSError:
            self._gone.set()

    def _leave(self) -> None:
        if self._hello is None:
            return
        for job in self._jobs.values():
            if not job.is_sealed:
                job.cancel("the trainer is gone")
        self._host.detach(self._hello)
        event(log, "trainer.left", pid=self._hello.pid, clean=self._clean)
        self._leave_seat(self._hello, keep=not self._clean)

    def _leave_seat(self, hello: Hello, *, keep: bool) -> None:
        if not self._host.memory.leave(hello.run, hello.seat, self, keep=keep):
            for slot in self._slots.values():
                slot.drop()
        self._slots = {}

    def _on_hello(self, message: Message, fds: list[int]) -> None:
        if message["protocol"] != PROTOCOL:
            self.notify("refused", error=f"the daemon speaks protocol {PROTOCOL}")
            return
        self._hello = hello = Hello.from_json(message["hello"])
        self._host.attach(hello)
        event(log, "trainer.joined", pid=hello.pid, index=hello.index, run=hello.run)
        self._sit({"kind": "welcome"})

    def _sit(self, answer: Message) -> None:
        """Give the trainer what its last life left in memory."""
        assert self._hello is not None
        slots = self._host.memory.own(self._hello.run, self._hello.seat, self)
        self._slots = {s.number: s for s in slots}
        rows = [{"number": s.number, "size": s.region.size, "busy": s.busy} for s in slots]
        self._channel.send({**answer, "slots": rows}, [s.region.fd for s in slots])

    def _on_seat(self, message: Message, fds: list[int]) -> None:
        """Before its first save a trainer says whose memory it goes on with."""
        assert self._hello is not None
        self._leave_seat(self._hello, keep=False)
        self._move(Hello.from_json(message["hello"]))
        self._sit({"kind": "seated", "ask": message["ask"]})

    def _on_join(self, message: Message, fds: list[int]) -> None:
        """The trainer is a participant of another session from now on. What it began before stays
        in the old one, where those that are `gone` will say nothing more."""
        assert self._hello is not None
        for index in message["gone"]:
            self._host.bury(self._hello.session, index)
        self._move(Hello.from_json(message["hello"]))

    def _move(self, hello: Hello) -> None:
        assert self._hello is not None
        self._host.detach(self._hello)
        self._hello = hello
        self._host.attach(hello)

    def _on_region(self, message: Message, fds: list[int]) -> None:
        assert self._hello is not None
        region = Region(fds[0], message["size"])
        slot = Slot(self._hello.run, self._hello.seat, message["slot"], region)
        old = self._slots.pop(slot.number, None)
        self._slots[slot.number] = slot
        self._host.memory.put(slot, owner=self)
        if old is not None and not old.is_dropped:
            old.drop()
        self._host.metrics.set("ft_ckpt_memory_bytes", self._host.memory.held_bytes())

    def _on_layout(self, message: Message, fds: list[int]) -> None:
        layout = layout_from_json(message["layout"])
        self._layouts[layout.digest] = layout

    def _on_save(self, message: Message, fds: list[int]) -> None:
        assert self._hello is not None
        order = Order.from_json(message["order"])
        slot = self._slots[order.slot]
        slot.held = None
        job = Job(
            order,
            self._layouts[order.layout],
            slot,
            hello=replace(self._hello, session=order.session, index=order.index, count=order.count),
            host=self._host,
            notify=self.notify,
            copies=self._copies,
            token=self._token,
        )
        self._jobs = {i: j for i, j in self._jobs.items() if not j.is_done}
        self._jobs[order.save_id] = job
        self._host.add_job(job)
        job.start()

    def _on_staged(self, message: Message, fds: list[int]) -> None:
        job = self._jobs.get(message["save_id"])
        if job is not None:
            job.file_staged(message["file"], message["offset"])

    def _on_sealed(self, message: Message, fds: list[int]) -> None:
        job = self._jobs.get(message["save_id"])
        if job is None or self._hello is None:
            return
        order = job.order
        if order.resident:
            job.slot.held = Held(
                run=self._hello.run,
                step=order.step,
                attempt=order.attempt,
                index=order.index,
                count=order.count,
                layout=job.layout,
                plain=message["plain"],
                metrics=dict(order.metrics),
            )
        self._host.metrics.add("ft_ckpt_staging_seconds_total", message.get("seconds", 0.0))
        self._host.metrics.add("ft_ckpt_staging_bytes_total", job.layout.data_bytes)
        job.seal(message["plain"])

    def _on_lost(self, message: Message, fds: list[int]) -> None:
        self._host.metrics.add("ft_ckpt_lost_seconds_total", message["seconds"])

    def _on_cancel(self, message: Message, fds: list[int]) -> None:
        job = self._jobs.get(message["save_id"])
        if job is None:
            return
        if message.get("if") == "idle":
            job.try_cancel(message["reason"])
            return
        job.slot.held = None
        job.cancel(message["reason"])

    def _on_memory(self, message: Message, fds: list[int]) -> None:
        """Lend the trainer every staged step of its run on this host."""
        assert self._hello is not None
        slots = [s for s in self._host.memory.slots(self._hello.run) if s.held is not None]
        rows = [held_to_json(s.held, s) for s in slots if s.held is not None]
        self._channel.send(
            {"kind": "memory", "held": rows, "ask": message["ask"]}, [s.region.fd for s in slots]
        )

    def _on_ring(self, message: Message, fds: list[int]) -> None:
        """Say where this daemon can be called, and learn who keeps copies of our memory."""
        assert self._hello is not None
        self._host.ring.allow(self._hello.run, message["token"])
        self._copies = tuple(message["copies"])
        self._token = message["token"]
        address = self._host.ring.listen(message["host"], message["port"])
        self._channel.send({"kind": "ring", "ask": message["ask"], "address": address})

    def _on_bye(self, message: Message, fds: list[int]) -> None:
        self._clean = not message["keep_memory"]

    _handlers: dict[str, Callable[[Session, Message, list[int]], None]] = {  # noqa: RUF012
        "hello": _on_hello,
        "seat": _on_seat,
        "join": _on_join,
        "region": _on_region,
        "layout": _on_layout,
        "save": _on_save,
        "staged": _on_staged,
        "sealed": _on_sealed,
        "lost": _on_lost,
        "cancel": _on_cancel,
        "memory": _on_memory,
        "ring": _on_ring,
        "bye": _on_bye,
    }
