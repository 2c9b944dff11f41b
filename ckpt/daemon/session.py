"""One trainer's connection to the daemon: its messages, acted on in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ckpt.daemon.host import Host
from ckpt.daemon.jobs import Job
from ckpt.daemon.memory import Held, Slot
from ckpt.daemon.orders import Hello, Order
from ckpt.daemon.ring import COPY_SLOT, held_to_json
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
        if self._clean:
            self._host.memory.drop(self._hello.run, self._hello.index, self)

    def _on_hello(self, message: Message, fds: list[int]) -> None:
        if message["protocol"] != PROTOCOL:
            self.notify("refused", error=f"the daemon speaks protocol {PROTOCOL}")
            return
        self._hello = hello = Hello.from_json(message["hello"])
        self._host.attach(hello)
        self._host.memory.own(hello.run, hello.index, self)
        event(log, "trainer.joined", pid=hello.pid, index=hello.index, run=hello.run)
        slots = self._host.memory.slots(hello.run, hello.index)
        slots = [s for s in slots if s.number < COPY_SLOT]
        rows = [{"number": s.number, "size": s.region.size, "busy": s.busy} for s in slots]
        self._channel.send({"kind": "welcome", "slots": rows}, [s.region.fd for s in slots])

    def _on_region(self, message: Message, fds: list[int]) -> None:
        assert self._hello is not None
        region = Region(fds[0], message["size"])
        slot = Slot(self._hello.run, self._hello.index, message["slot"], region)
        self._host.memory.put(slot)
        self._host.metrics.set("ft_ckpt_memory_bytes", self._host.memory.held_bytes())

    def _on_layout(self, message: Message, fds: list[int]) -> None:
        layout = layout_from_json(message["layout"])
        self._layouts[layout.digest] = layout

    def _on_save(self, message: Message, fds: list[int]) -> None:
        assert self._hello is not None
        order = Order.from_json(message["order"])
        slot = self._host.memory.get(self._hello.run, self._hello.index, order.slot)
        slot.held = None
        job = Job(
            order,
            self._layouts[order.layout],
            slot,
            hello=self._hello,
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
