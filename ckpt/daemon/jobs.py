"""One save of one participant: hash every staged file, write it to each destination, commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ckpt.assemble import Part
from ckpt.daemon.commit import Committer
from ckpt.daemon.host import Host
from ckpt.daemon.memory import Slot
from ckpt.daemon.orders import Hello, Order
from ckpt.daemon.ring import push
from ckpt.daemon.target import Target
from ckpt.errors import CheckpointError, IncompleteSave, SaveFailed
from ckpt.hashing import chunk_digests, content_name
from ckpt.manifest import File, step_directory
from ckpt.plan import Layout, is_owner
from ftcore.base.errors import FtError
from ftcore.base.log import event

log = logging.getLogger(__name__)
Notify = Callable[..., None]
# Two files at a time: one is fsynced while the next is written.
FILES_AT_ONCE = 2


class Cancelled(CheckpointError):
    """The save was taken back before it was complete."""

    remedy = "The trainer died before its state was staged, or a newer save replaced this one."


class Job:
    """Runs until every destination has the step or has failed. Threads end with the job."""

    def __init__(
        self,
        order: Order,
        layout: Layout,
        slot: Slot,
        *,
        hello: Hello,
        host: Host,
        notify: Notify,
        copies: Sequence[str] = (),
        token: str = "",
    ) -> None:
        self.order, self.layout, self.slot = order, layout, slot
        self.hello, self.host, self._notify = hello, host, notify
        self.plain: str | None = None
        self.started_s = time.monotonic()
        self._changed = threading.Condition()
        self._staged: dict[int, int] = {}
        self._hashed: dict[int, Future[File]] = {}
        self._cancelled = ""
        self._begun = False
        self._written: dict[int, set[str]] = {}
        targets, self._broken = opened(host, hello, order)
        tickets = [t.turns.ticket(hello.run, hello.seat) for t in targets]
        self._threads = [
            threading.Thread(target=self._run, args=pair, name="ckpt-job")
            for pair in zip(targets, tickets, strict=True)
        ]
        self._targets = targets
        self._token = token
        for address in copies if order.resident else ():
            self._threads.append(threading.Thread(target=self._copy_to, args=(address,)))
        self._left = len(self._threads)
        slot.busy += 1

    @property
    def owned(self) -> list[int]:
        """The files that this participant writes: those of which it is the owner."""
        return [n for n, f in enumerate(self.layout.files) if is_owner(f, self.order.copies)]

    def start(self) -> None:
        for url, error in self._broken:
            self._tell_failed(url, error)
        for thread in self._threads:
            thread.start()
        if not self._threads:
            self._release()

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def file_staged(self, number: int, offset: int) -> None:
        """File `number` lies in the slot at `offset`, whole."""
        with self._changed:
            self._staged[number] = offset
            if number in set(self.owned):
                self._hashed[number] = self.host.hashers.submit(self._hash, number)
            self._changed.notify_all()

    def seal(self, plain: str) -> None:
        """All is staged: from here on the save completes whatever becomes of the trainer."""
        with self._changed:
            self.plain = plain
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Take the save back unless it is sealed and under way to being committed."""
        with self._changed:
            self._cancelled = reason
            self._changed.notify_all()

    def try_cancel(self, reason: str) -> bool:
        """Take the save back if no destination has begun with it; a newer one replaces it."""
        with self._changed:
            if self._begun:
                return False
            self.slot.held = None
        self.cancel(reason)
        return True

    @property
    def is_sealed(self) -> bool:
        return self.plain is not None

    def image(self, number: int) -> memoryview:
        """The bytes of a staged file."""
        offset = self._staged[number]
        return self.slot.region.view[offset : offset + self.layout.files[number].size]

    def _hash(self, number: int) -> File:
        started = time.monotonic()
        image = self.image(number)
        digests = chunk_digests(image)
        name = f"{self.order.attempt}-{self.order.index:05d}-{number:04d}"
        key = f"{name}-{content_name(digests)}.safetensors"
        self.host.metrics.observe("hash", "memory", len(image), time.monotonic() - started)
        return File(key, len(image), digests)

    def _run(self, target: Target, ticket: int) -> None:
        """The life of this save at one destination."""
        url, order = target.destination.url, self.order
        committer = Committer(self, target)
        try:
            with target.turns.take(self.hello.run, self.hello.seat, ticket):
                stored = self._save_to(target, committer)
        except Exception as error:
            self._fail(target, error, committer)
        else:
            seconds = time.monotonic() - self.started_s
            self.host.metrics.durable(url, order.step, stored, seconds, order.created_unix_s)
            event(log, "save.durable", url=url, step=order.step, bytes=stored, seconds=seconds)
            self._notify("durable", save_id=order.save_id, url=url, bytes=stored, seconds=seconds)
            committer.clean_up()
        finally:
            self._one_done()

    def _copy_to(self, address: str) -> None:
        """Have another host's daemon keep this step in memory. A failure costs only the copy."""
        started = time.monotonic()
        try:
            self._await(lambda: self.slot.held is not None or self.plain is not None)
            held = self.slot.held
            if held is not None and held.attempt == self.order.attempt:
                files = zip(self.layout.pool_offsets, self.layout.files, strict=True)
                view = self.slot.region.view
                digests = tuple(chunk_digests(view[at : at + f.size]) for at, f in files)
                push(address, self._token, replace(held, digests=digests), self.slot.region)
                seconds = time.monotonic() - started
                self.host.metrics.observe("copy", "peers", self.layout.pool_bytes, seconds)
        except Exception as error:
            self.host.metrics.failed("peers", type(error).__name__)
            event(log, "copy.failed", level=logging.WARNING, peer=address, error=str(error))
        finally:
            self._one_done()

    def _save_to(self, target: Target, committer: Committer) -> int:
        with self._changed:
            self.check()
            self._begun = True
        self.host.check_fence(target, self.hello, self.order.step)
        files = self._write_all(target, self.owned)
        self._await(lambda: self.plain is not None)
        part = Part(
            index=self.order.index,
            layout=self.layout,
            files=files,
            plain=self.plain or "",
            metrics=self.order.metrics,
        )
        return committer.commit(part)

    def _write_all(self, target: Target, numbers: Sequence[int]) -> dict[int, File]:
        """Write these files as they get staged."""
        files: dict[int, Future[File]] = {}
        with ThreadPoolExecutor(FILES_AT_ONCE, "ckpt-write") as pool:
            try:
                for number in self._in_staged_order(numbers):
                    files[number] = pool.submit(self.write_file, target, number)
                return {n: f.result() for n, f in files.items()}
            except BaseException:
                for future in files.values():
                    future.cancel()
                raise

    def _in_staged_order(self, numbers: Sequence[int]):  # type: ignore[no-untyped-def]
        left = set(numbers)
        while left:
            self._await(lambda: bool(left & self._staged.keys()))
            for number in sorted(left & self._staged.keys()):
                left.discard(number)
                yield number

    def write_file(self, target: Target, number: int) -> File:
        """Hash, write and fsync one file at one destination."""
        with self._changed:
            if number not in self._staged:
                raise IncompleteSave(f"step {self.order.step} was staged in waves: file is gone")
            if number not in self._hashed:  # taken over from a dead participant
                self._hashed[number] = self.host.hashers.submit(self._hash, number)
        file = self._hashed[number].result()
        self.check()
        started = time.monotonic()
        upload_file(target, f"{step_directory(self.order.step)}/{file.key}", self.image(number))
        seconds = time.monotonic() - started
        self.host.metrics.observe("write", target.destination.url, file.size, seconds)
        self._one_written(number, target.destination.url)
        return file

    def _one_written(self, number: int, url: str) -> None:
        with self._changed:
            done = self._written.setdefault(number, set())
            done.add(url)
            whole = len(done) == len(self._targets)
        if whole and not self.order.resident:
            self._notify("written", save_id=self.order.save_id, file=number)

    def check(self) -> None:
        if self._cancelled:
            raise Cancelled(f"step {self.order.step} was cancelled: {self._cancelled}")

    def _await(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._cancelled)
        self.check()

    def _fail(self, target: Target, error: Exception, committer: Committer) -> None:
        """Tell, and remove what was written, unless somebody may commit it or has already."""
        order = self.order
        self._tell_failed(target.destination.url, error)
        if not committer.is_posted:
            target.remove_attempt(order.step, order.attempt, order.index)

    def _tell_failed(self, url: str, error: Exception) -> None:
        order = self.order
        event(
            log,
            "save.failed",
            level=logging.WARNING,
            url=url,
            step=order.step,
            error=f"{type(error).__name__}: {error}",
        )
        if not isinstance(error, FtError):
            log.debug("save.failed", exc_info=error)
        self.host.metrics.failed(url, type(error).__name__)
        remedy = getattr(error, "remedy", "") or SaveFailed.remedy
        text = str(error) if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
        kind = type(error).__name__
        self._notify(
            "failed", save_id=order.save_id, url=url, error=text, kind_of_error=kind, remedy=remedy
        )
        if not order.resident:
            for number in range(len(self.layout.files)):
                self._one_written(number, url)

    def _one_done(self) -> None:
        with self._changed:
            self._left -= 1
            last = self._left == 0
        if last:
            self._release()

    def _release(self) -> None:
        for future in self._hashed.values():
            future.cancel()
        self.slot.release()
        self.host.job_done(self)
        self._notify("free", slot=self.slot.number, save_id=self.order.save_id)


def opened(
    host: Host, hello: Hello, order: Order
) -> tuple[list[Target], list[tuple[str, Exception]]]:
    """The destinations of a save that still lack it, and those that cannot even be opened."""
    targets: list[Target] = []
    broken: list[tuple[str, Exception]] = []
    for destination in hello.destinations:
        if destination.url in order.durable_at:
            continue
        try:
            targets.append(host.target(destination))
        except Exception as error:
            broken.append((destination.url, error))
    return targets, broken


def upload_file(target: Target, key: str, image: memoryview) -> None:
    """Send one file in parallel parts, no faster than the destination may be used."""
    store = target.store
    with store.start_upload(key, len(image)) as upload:
        step = upload.part_bytes

        def send(index: int, part: memoryview) -> None:
            target.throttle.take(len(part))
            upload.put_part(index, part)

        starts = range(0, len(image), step)
        parts = [(i, image[start : start + step]) for i, start in enumerate(starts)]
        store.run_parallel([partial(send, *part) for part in parts])
        upload.finish()
