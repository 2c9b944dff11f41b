"""The checkpointer of a training process: save without stopping, restore the newest good step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, get_args

from ckpt import client as clients
from ckpt.capture import Captured, Place, Planner
from ckpt.collector import collector_paused
from ckpt.daemon.orders import Destination, Hello, Order
from ckpt.destinations import Where, as_destinations, run_name
from ckpt.errors import DaemonGone, SaveSkipped
from ckpt.handle import SaveHandle
from ckpt.loading import Request, as_select
from ckpt.meet import Meeting, default_meeting, default_place, meeting_of
from ckpt.memory_tier import MemoryTier
from ckpt.peer_tier import PeerTier
from ckpt.progress import ProgressLine, size_text
from ckpt.region import Region
from ckpt.restore import Restored, Restorer
from ckpt.retention import Policy
from ckpt.saver import Saver, Saving
from ckpt.slots import file_bytes_for_waves
from ckpt.staging import Gate, Versions
from ckpt.stores import Store, open_store
from ckpt.tiers import StoreTier, Tier
from ckpt.wire import Message
from ftcore.base.errors import BadSetting
from ftcore.base.log import event

log = logging.getLogger(__name__)
# Tries of one group by itself are numbered from here on, so that no other group has the number.
ALONE_FROM = 1_000_000
WhenBusy = Literal["wait", "skip", "newest"]


class Checkpointer:
    """Saves states to one or more destinations and restores the newest complete one.

    Args:
        destinations: a path, a URL (`s3://`, `gs://`, `file://`, `memory://`, anything of fsspec),
            a Destination with options, or a list of these; restores look in them in this order.
        keep_last, keep_every, keep_best, metric, best_is, keep_younger_s: which steps to keep; a
            step is kept if any rule keeps it, all are kept without rules, the newest always.
        staging_slots: steps that fit into staging memory at once (default 1; 2 with
            when_busy="newest"). Each takes as much host memory as this rank's state.
        staging_bytes_max: budget of staging memory in bytes. A state that does not fit is copied
            in waves, and optimizer steps wait for the uploads.
        when_busy: what a save does while all slots are being uploaded: "wait" (the next optimizer
            step waits), "skip" (this save fails with SaveSkipped), or "newest" (a staged save
            whose upload has not begun gives way).
        bytes_per_s: upload limit for each destination; 0 is none.
        place, session: which participant this is and the id of this life of the job; taken from
            torch.distributed when it is initialised.
        participants_timeout_s: how long a save waits for participants that are not known to be
            dead before others take over what they should have written.
        memory_copies: how many other hosts' daemons keep each staged step in memory. The ring is
            made of the daemons of all ranks; `ring_address` is where this host's daemon listens
            for it (HOST:PORT, port 0 picks one; loopback unless told otherwise).
        inline: run the daemon in threads of this process; saves then die with it.
        linger_s: how long the daemon stays, and keeps the newest step in memory, without trainers.

        show_progress: tell on stderr what is restored and what became durable; by default when
            it is a terminal.

    A state is a mapping from names to modules, optimizers, objects with `state_dict` and
    `load_state_dict`, tensors, plain values, `per_rank(...)` values, and containers of these.
    """

    def __init__(
        self,
        destinations: Where | Sequence[Where],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        best_is: str = "lowest",
        keep_younger_s: float | None = None,
        staging_slots: int | None = None,
        staging_bytes_max: int | None = None,
        when_busy: WhenBusy = "wait",
        bytes_per_s: float = 0.0,
        place: Place | None = None,
        session: str | None = None,
        meeting: Meeting | None = None,
        participants_timeout_s: float = 60.0,
        memory_copies: int = 0,
        ring_address: str = "127.0.0.1:0",
        inline: bool = False,
        linger_s: float = 600.0,
        metrics_address: str = "",
        show_progress: bool | None = None,
    ) -> None:
        policy = Policy(
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            metric=metric,
            best_is=best_is,
            keep_younger_s=keep_younger_s,
        )
        if when_busy not in get_args(WhenBusy):
            raise BadSetting(f"when_busy is {when_busy!r}, not one of {get_args(WhenBusy)}")
        self.destinations = as_destinations(destinations, bytes_per_s)
        self.place = place or default_place()
        self._meeting = meeting or default_meeting(self.place)
        self.session = session or self._meeting.session()
        self._when_busy = when_busy
        slots = staging_slots or (2 if when_busy == "newest" else 1)
        budget = None if staging_bytes_max is None else staging_bytes_max // slots
        waves = None if budget is None else file_bytes_for_waves(budget)
        self._planner = Planner(resident_bytes_max=budget, wave_bytes=waves)
        self._gate = Gate()
        self._saver = Saver(self._gate, slots, staging_bytes_max)
        self._saver.progress = self._progress = ProgressLine(show=show_progress)
        self._ids = itertools.count(1)
        self._attempts: dict[int, int] = {}
        self._stores: dict[str, Store] = {}
        self._lost_s = self._reported_s = 0.0
        self._is_closed = False
        self.last_restored: Restored | None = None
        self._hello = Hello(
            run=run_name(self.destinations),
            seat=str(self.place.index),
            session=self.session,
            index=self.place.index,
            count=self.place.count,
            pid=os.getpid(),
            destinations=self.destinations,
            retention=policy.to_json(),
            participants_timeout_s=participants_timeout_s,
        )
        self._client = self._connect(inline, linger_s, metrics_address)
        self._peers, self._token = list[str](), ""
        if memory_copies:
            self._join_ring(memory_copies, ring_address)

    def _connect(self, inline: bool, linger_s: float, metrics_address: str) -> clients.Client:
        def connect() -> Any:
            if inline:
                return clients.connect_inline()
            return clients.connect_or_spawn(linger_s=linger_s, metrics_address=metrics_address)

        try:
            client = clients.Client(self._hello, self._saver, connect=connect)
        except BaseException:
            self._gate.close()
            raise
        self._adopt(*client.welcome)
        self._saver.start(client)
        client.start()
        return client

    def _adopt(self, answer: Message, fds: Sequence[int]) -> None:
        """Go on with the staging memory of an earlier life."""
        for row, fd in zip(answer["slots"], fds, strict=True):
            region = Region(fd, row["size"])
            if row["busy"] or not self._saver.slots.adopt(row["number"], region):
                region.close()

    # --- as one of several replica groups -------------------------------------------------------

    def sit(self, seat: str, *, rank: int, ranks: int, store: Any = None) -> None:
        """Be rank `rank` of a replica group that has `ranks`, before anything is saved. `seat`
        names this rank over all its lives, also among the other groups of the job: what it staged
        last is its own again. Ranks of one group meet through `store`."""
        self.place = Place(rank=rank, ranks=ranks)
        self._meeting = meeting_of(self.place, store)
        self.session = self._meeting.session()
        self._hello = replace(self._hello, seat=seat, session=self.session, index=rank, count=ranks)
        self._adopt(*self._client.sit(self._hello))

    def join(self, session: str, *, group: int, groups: int, gone: Iterable[int] = ()) -> None:
        """Be group number `group` of `groups` that save the same state together as `session`, an
        id that all of them give alike. `gone` are groups of the session before that will not
        complete what was begun there: others write their part."""
        ranks = self.place.ranks
        self.place = replace(self.place, group=group, groups=groups)
        self.session, self._attempts = session, {}
        self._hello = replace(
            self._hello, session=session, index=self.place.index, count=self.place.count
        )
        indices = [each * ranks + rank for each in gone for rank in range(ranks)]
        self._client.join(self._hello, gone=indices)

    def _join_ring(self, copies: int, ring_address: str) -> None:
        """Let every daemon know the token of this session, and ours who keeps its copies."""
        host, _, port = ring_address.rpartition(":")
        ask = {"kind": "ring", "host": host, "port": int(port)}
        self._token = str(self._meeting.exchange(secrets.token_hex(16))[0])
        answer, _ = self._client.ask({**ask, "token": self._token, "copies": []})
        ring = list(dict.fromkeys(self._meeting.exchange(answer["address"])))
        at = ring.index(answer["address"])
        self._peers = [ring[(at + i) % len(ring)] for i in range(1, len(ring))]
        keepers = self._peers[:copies]
        if len(keepers) < copies:
            event(log, "ring.short", level=logging.WARNING, daemons=len(ring), copies=copies)
        self._client.ask({**ask, "token": self._token, "copies": keepers})
        self._saver.ring = {**ask, "token": self._token, "copies": keepers}

    # --- saving ---------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        alone: bool = False,
    ) -> SaveHandle:
        """Begin to save `state` as `step` and return at once.

        The state may be used freely; optimizers of this process wait by themselves until it is
        copied, anything else that writes in place calls `handle.wait_staged()` first. `alone`: this
        replica group writes all of it, because the other groups do not save this step. Raises
        CannotStore, with the path, for a value that has no encoding. Everything that goes wrong
        later is told by the handle, and never disturbs later saves.
        """
        started = time.perf_counter()
        if step < 0:
            raise BadSetting(f"step is {step}", remedy="Steps count from 0.")
        handle = SaveHandle(step, self.urls)
        if self._when_busy == "skip" and not self._saver.slots.has_free:
            handle.fail(SaveSkipped(f"step {step}: earlier uploads still use all staging slots"))
            return handle
        if self._when_busy == "newest" and not self._saver.slots.has_free:
            self._saver.cancel_waiting(f"step {step} took its place")
        self._report_lost()
        place = replace(self.place, group=0, groups=1) if alone else self.place
        captured = self._planner.capture(state, place)
        order = self._order(step, captured, metrics or {}, place)
        versions = Versions.of(captured.tensors)
        self._saver.submit(
            Saving(
                order=order,
                handle=handle,
                layout=captured.layout,
                captured=captured,
                versions=versions,
            )
        )
        self._lost_s += time.perf_counter() - started
        return handle

    def _order(
        self, step: int, captured: Captured, metrics: Mapping[str, float], place: Place
    ) -> Order:
        number = self._attempts[step] = self._attempts.get(step, 0) + 1
        if place != self.place:  # a try of this group only
            number += ALONE_FROM * (1 + self.place.group)
        return Order(
            save_id=next(self._ids),
            step=step,
            attempt=f"{self.session}.{number}",
            index=place.index,
            count=place.count,
            ranks=place.ranks,
            slot=0,
            layout=captured.layout.digest,
            created_unix_s=time.time(),
            copies=captured.planned.copies,
            metrics={k: float(v) for k, v in metrics.items()},
        )

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make staging memory ready in the background, so that the first save costs what later
        ones do. Call it once the optimizer has its state, on the training thread."""
        captured = self._planner.capture(state, self.place)
        layout, is_on_device = captured.layout, any(t.is_cuda for t in captured.tensors)
        self._saver.rehearse(captured)
        self._saver.submit_call(lambda: self._saver.prefault(layout, is_on_device=is_on_device))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save so far is durable or has failed. Failures are logged."""
        self._saver.drain(timeout_s)

    @property
    def urls(self) -> tuple[str, ...]:
        """Where steps are saved to."""
        return tuple(d.url for d in self.destinations)

    @property
    def lost_s(self) -> float:
        """Seconds that training has waited for saves so far: calls and gated optimizer steps."""
        return self._lost_s + self._gate.waited_s

    def _report_lost(self) -> None:
        lost = self.lost_s - self._reported_s
        if lost > 0:
            self._client.post({"kind": "lost", "seconds": lost})
            self._reported_s += lost

    # --- restoring ------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        only: str | Iterable[str] | Callable[[str], bool] | None = None,
    ) -> int | None:
        """Fill `state` from the newest complete step, or from `step`, and return the step.

        Returns None when there is none. A destination that holds a stock DCP checkpoint or
        safetensors files instead of steps is read as step 0, without checksums.

        A step that cannot be read, or whose checksums differ, is passed over for another tier and
        then for an older step, with a warning. Raises
        StateMismatch, with a report and before anything is changed, when names, shapes or types
        differ (strict) or a shape or type differs (not strict). `only` selects names: a prefix,
        prefixes, or a predicate.
        """
        request = Request(
            step=step, strict=strict, select=as_select(only), allow_fallback=step is None
        )
        memory = self._memory()
        tiers: list[Tier] = [memory] if memory is not None else []
        if self._peers:
            tiers.append(PeerTier(self._hello.run, self._token, self._peers))
        self._progress.start("restoring")
        tiers += [
            StoreTier(self.store(d), self._progress.add, is_partial=d.private)
            for d in self.destinations
        ]
        try:
            restorer = Restorer(
                state, tiers, place=self.place, meeting=self._meeting, planner=self._planner
            )
            with collector_paused():
                self.last_restored = restorer.run(request) or self._restore_foreign(state, request)
        finally:
            if memory is not None:
                memory.close()
        if self.last_restored is None:
            return None
        found = self.last_restored
        self._progress.say(
            f"restored step {found.step} from {found.tier}: {size_text(found.bytes)} in "
            f"{found.seconds:.2f} s"
        )
        return self.last_restored.step

    def _restore_foreign(self, state: Mapping[str, Any], request: Request) -> Restored | None:
        """What others wrote, where there is no step of ours."""
        from ckpt.interop.errors import ForeignFormat
        from ckpt.interop.foreign import tier_of

        tiers: list[Tier] = []
        for destination in self.destinations if request.step is None else ():
            with contextlib.suppress(ForeignFormat):
                tiers.append(tier_of(self.store(destination), None, lambda name: name))
        if not any(self._meeting.exchange(bool(tiers))):
            return None
        restorer = Restorer(
            state, tiers, place=self.place, meeting=self._meeting, planner=self._planner
        )
        return restorer.run(replace(request, step=0))

    def _memory(self) -> MemoryTier | None:
        try:
            with collector_paused():
                return MemoryTier(self._client)
        except (DaemonGone, OSError) as error:
            event(log, "memory.unreachable", level=logging.WARNING, error=str(error))
            return None

    def store(self, destination: Destination) -> Store:
        """This process's own view of a destination."""
        if destination.url not in self._stores:
            self._stores[destination.url] = open_store(destination.url, **destination.options)
        return self._stores[destination.url]

    # --- ending ---------------------------------------------------------------------------------

    def close(self, *, wait: bool = True, keep_memory: bool = False) -> None:
        """Wait until saves under way are staged and, unless told not to, durable; give back
        memory and the connection. `keep_memory` leaves the newest step in the daemon's memory for
        a quick restart. Does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        if wait:
            self.wait()
        self._saver.wait_staged()
        self._report_lost()
        self._client.close(keep_memory=keep_memory)
        self._saver.close()
        self._gate.close()
        for store in self._stores.values():
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(keep_memory=kind is not None)
