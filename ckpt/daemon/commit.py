"""Meet the other participants of a save through memory or the store, and publish the manifest."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.assemble import Fill, Impossible, Part, Whole, assemble
from ckpt.errors import Fenced, IncompleteSave
from ckpt.manifest import (
    Manifest,
    files_from_json,
    files_to_json,
    frame,
    manifest_key,
    step_directory,
    unframe,
)
from ckpt.plan import Layout, layout_from_json, layout_to_json
from ckpt.stores import Outcome
from ftcore.base.log import event
from ftcore.base.retry import backoff

if TYPE_CHECKING:
    from ckpt.daemon.host import Host
    from ckpt.daemon.jobs import Job
    from ckpt.daemon.target import Target

log = logging.getLogger(__name__)


class Meeting:
    """What the participants of one attempt at one destination have told each other so far."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.committing = threading.Lock()
        self.parts: dict[int, Part] = {}
        self.committed: int | None = None  # bytes
        self.included: frozenset[int] = frozenset()  # whose parts are in what was committed

    def post(self, part: Part) -> None:
        with self.changed:
            self.parts[part.index] = part
            self.changed.notify_all()


class Committer:
    """Brings one part to its meeting and stays until the step is committed or cannot be."""

    def __init__(self, job: Job, target: Target) -> None:
        self._job, self._target = job, target
        self._host: Host = job.host
        self._order = job.order
        key = (target.destination.url, job.order.step, job.order.attempt)
        self._meeting = self._host.meeting(key)
        self._posted_at = f"{step_directory(job.order.step)}/notes/{job.order.attempt}/"
        self._used_store = False
        self.is_posted = False  # from here on others may commit what we wrote: it is never removed
        self._is_private = target.destination.private

    @property
    def _is_local(self) -> bool:
        """Whether nobody elsewhere has to be told: all are here, or nobody else sees this disk."""
        return self._is_private or self._host.is_all_here(self._job.hello)

    def commit(self, part: Part) -> int:
        """Return the bytes of the committed step. An error whose cause is a lost answer is none: if
        the manifest is there, the step is."""
        try:
            return self._commit(part)
        except Exception:
            committed = self._committed_anyway()
            if committed is None:
                raise
            return committed

    def _committed_anyway(self) -> int | None:
        try:
            manifest = self._target.manifest(self._order.step)
        except Exception:
            return None
        is_ours = manifest is not None and manifest.attempt == self._order.attempt
        return manifest.stored_bytes if manifest is not None and is_ours else None

    def _commit(self, part: Part) -> int:
        """Return the bytes of the committed step. Raises IncompleteSave when it cannot be."""
        deadline = time.monotonic() + self._job.hello.participants_timeout_s
        waits = backoff(random.Random(), first_s=0.05, max_s=1.0)
        self._post(part)
        while True:
            self._job.check()
            with self._meeting.committing:
                if part.index in self._meeting.included and self._meeting.committed is not None:
                    return self._meeting.committed
                decision = self._decide(late=time.monotonic() > deadline)
                if isinstance(decision, Whole):
                    return self._publish(decision)
            if isinstance(decision, Impossible):
                raise IncompleteSave(f"step {self._order.step}: {decision.reason}")
            if isinstance(decision, Fill) and part.index in decision.files:
                part = self._take_over(part, decision.files[part.index])
                continue
            self._wait(next(waits))
            committed = self._committed_elsewhere()
            if committed is not None:
                return committed

    def _committed_elsewhere(self) -> int | None:
        """Another host saw all parts first. It may have removed the notes since."""
        if not self._used_store or self._target.store.stat(manifest_key(self._order.step)) is None:
            return None
        manifest = self._target.manifest(self._order.step)
        if manifest is None or manifest.attempt != self._order.attempt:
            return None
        return manifest.stored_bytes

    def clean_up(self) -> None:
        """After the commit: notes and what retention drops. Failures here never hurt the step."""
        try:
            if self._used_store:
                self._target.delete_prefix(self._posted_at)
            self._host.retain(self._target, self._job.hello, self._order.step)
        except Exception as error:
            event(log, "retention.failed", level=logging.WARNING, error=str(error))

    def _decide(self, *, late: bool) -> Any:
        parts, dead = self._gather()
        here = self._host.participants_here(self._job.hello) if self._is_private else None
        if late:
            known = self._host.last_layouts(self._job.hello)
            for index in (here or set(range(self._order.count))) - parts.keys() - dead.keys():
                dead[index] = known.get(index) or self._layout_in_last_step(index)
        for index in (i for i, layout in dead.items() if layout is None):
            dead[index] = self._layout_of_replica(index, parts)
        return assemble(
            parts, count=self._order.count, dead=dead, covers=self._host.covers(), here=here
        )

    def _layout_in_last_step(self, index: int) -> Layout | None:
        """What a participant held in the newest step of this session: notes of it may be gone."""
        for step in self._target.steps()[:1]:
            manifest = self._target.manifest(step)
            if manifest is not None and manifest.attempt.startswith(self._job.hello.session):
                digest = manifest.layouts.get(str(index))
                return None if digest is None else self._target.layout(digest)
        return None

    def _gather(self) -> tuple[dict[int, Part], dict[int, Layout | None]]:
        # First who is silent, then what was said: who says it last is no longer at work on it.
        dead = self._host.silent(self._job.hello, self._order.attempt)
        with self._meeting.changed:
            parts = dict(self._meeting.parts)
        if not self._is_local and len(parts) + len(dead) < max(self._order.count, 2):
            notes = self._read_notes()
            parts = {i: n for i, n in notes.items() if isinstance(n, Part)} | parts
            for part in parts.values():  # should it die, this says what it held
                self._host.remember_layout(self._job.hello, part)
            dead |= {i: n for i, n in notes.items() if not isinstance(n, Part)}
        return parts, {i: layout for i, layout in dead.items() if i not in parts}

    def _layout_of_replica(self, index: int, parts: Mapping[int, Part]) -> Layout | None:
        """Replicas hold the same, so what one of them wrote tells what a silent one held."""
        replicas = self._order.replicas_of(index)
        return next((parts[i].layout for i in replicas if i in parts), None)

    def _take_over(self, part: Part, numbers: tuple[int, ...]) -> Part:
        """Write files that a dead participant should have written; we hold the same bytes."""
        event(log, "save.took_over", step=self._order.step, files=len(numbers))
        written = {n: self._job.write_file(self._target, n) for n in numbers}
        part = Part(
            index=part.index,
            layout=part.layout,
            files={**part.files, **written},
            plain=part.plain,
            metrics=part.metrics,
        )
        self._post(part)
        return part

    def _wait(self, seconds: float) -> None:
        if self._is_local:
            seconds = min(seconds, 0.2)  # only deadlines and cancelling need a look
        with self._meeting.changed:
            self._meeting.changed.wait(seconds)

    def _post(self, part: Part) -> None:
        self.is_posted = True
        self._meeting.post(part)
        self._host.remember_layout(self._job.hello, part)
        if not self._is_local:
            self._used_store = True
            self._target.share_layout(part.layout)
            key = f"{self._posted_at}{part.index:05d}.note"
            self._target.store.put(key, frame(json.dumps(_part_to_json(part))))

    def _read_notes(self) -> dict[int, Part | Layout | None]:
        notes: dict[int, Part | Layout | None] = {}
        for info in list(self._target.store.list(self._posted_at)):
            try:
                content = unframe(self._target.store.get(info.key), where=info.key)
            except Exception:  # deleted after the commit, or still on its way
                continue
            notes[int(content["index"])] = self._note(content)  # type: ignore[call-overload]
        return notes

    def _note(self, content: Mapping[str, Any]) -> Part | Layout | None:
        layout = self._target.layout(content["layout"])
        if content.get("dead"):
            return layout
        if layout is None:
            raise IncompleteSave(f"layout {content['layout']} of participant is missing")
        return _part_from_json(content, layout)

    def _publish(self, whole: Whole) -> int:
        """Write the manifest: the commit point."""
        parts, _ = self._gather()
        order = self._order
        manifest = Manifest(
            step=order.step,
            attempt=order.attempt,
            epoch=self._target.epoch(self._job.hello.session),
            created_unix_s=order.created_unix_s,
            participants=order.count,
            files=whole.files,
            tensors=whole.tensors,
            values=_distinct_plain(parts),
            metrics={k: v for p in parts.values() for k, v in p.metrics.items()},
            layouts={} if self._is_local else {str(i): p.layout.digest for i, p in parts.items()},
        )
        data = manifest.to_bytes(columns_json=whole.columns)
        if self._is_private and self._meeting.included:  # one more rank of this host joined
            self._target.store.put(manifest_key(order.step), data)
            replaced = None
        else:
            replaced = publish(self._target, manifest, data)
        self._target.remove_replaced(manifest, replaced)
        self._meeting.committed = manifest.stored_bytes
        self._meeting.included = frozenset(parts)
        with self._meeting.changed:
            self._meeting.changed.notify_all()
        return manifest.stored_bytes


def publish(target: Target, manifest: Manifest, data: bytes) -> Manifest | None:
    """Make `manifest`, whose encoding is `data`, the committed one of its step; return the one
    that it replaced, if any.

    An older manifest of the step stays valid until the new one stands in its place.
    """
    key, store = manifest_key(manifest.step), target.store
    if len(data) > store.limits.single_put_bytes_max:
        old = target.manifest(manifest.step)
        store.put_large(key, data)
        return old
    if store.put_if_absent(key, data) is not Outcome.EXISTS:
        return None
    old = target.manifest(manifest.step)
    if old is not None and old.attempt == manifest.attempt:
        return None
    if old is not None and old.epoch > manifest.epoch:
        raise Fenced(
            f"step {manifest.step} at {store.url} was committed by a trainer that took over "
            f"(epoch {old.epoch}, ours is {manifest.epoch})"
        )
    store.put(key, data)
    return old


def _distinct_plain(parts: Mapping[int, Part]) -> dict[str, object]:
    """Plain values by participant; those equal to the first one's are left out."""
    first = parts[min(parts)].plain
    return {
        str(i): p.plain for i, p in sorted(parts.items()) if i == min(parts) or p.plain != first
    }


def _part_to_json(part: Part) -> dict[str, object]:
    numbers = sorted(part.files)
    return {
        "index": part.index,
        "layout": part.layout.digest,
        "numbers": numbers,
        "files": files_to_json(part.files[n] for n in numbers),
        "plain": part.plain,
        "metrics": dict(part.metrics),
    }


def _part_from_json(content: Mapping[str, Any], layout: Layout) -> Part:
    files = dict(zip(content["numbers"], files_from_json(content["files"]), strict=True))
    return Part(
        index=content["index"],
        layout=layout,
        files=files,
        plain=content["plain"],
        metrics=content["metrics"],
    )


def layout_note(layout: Layout) -> bytes:
    return frame(json.dumps(layout_to_json(layout), separators=(",", ":")))


def read_layout_note(data: bytes, *, where: str) -> Layout:
    return layout_from_json(unframe(data, where=where))  # type: ignore[arg-type]
