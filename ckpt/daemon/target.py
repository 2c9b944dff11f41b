"""One destination as the daemon sees it: its store, who owns it, what may be deleted there."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time

from ckpt.daemon.commit import layout_note, read_layout_note
from ckpt.daemon.orders import Destination, Hello
from ckpt.daemon.throttle import Throttle, Turns
from ckpt.errors import Fenced
from ckpt.listing import newest_first, read_manifest
from ckpt.manifest import MANIFEST_NAME, Manifest, frame, step_directory, step_of, unframe
from ckpt.plan import Layout
from ckpt.stores import Outcome, Store, open_store
from ckpt.stores.errors import ObjectMissing
from ckpt.stores.file import FileStore
from ftcore.base.log import event

log = logging.getLogger(__name__)
OWNERS = "owners/"
LAYOUTS = "layouts/"
PINS = "pins/"
# Leftovers of hosts that we cannot ask are kept this long: their daemons may still be uploading.
FOREIGN_JUNK_AGE_S = 3600.0


class Target:
    """Thread-safe. Created on first use of a destination and kept."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.store: Store = open_store(destination.url, **destination.options)
        self.throttle = Throttle(destination.bytes_per_s)
        self.turns = Turns()
        self._lock = threading.Lock()
        self._epochs: dict[str, int] = {}
        self._layouts: dict[str, Layout] = {}

    def epoch(self, session: str, *, is_alone: bool = False) -> int:
        """The epoch under which `session` writes here. Taken, above all others, at first use;
        `is_alone` when no other host takes part in the session."""
        with self._lock:
            if session not in self._epochs:
                self._epochs[session] = self._take_epoch(session, is_alone)
            return self._epochs[session]

    def _take_epoch(self, session: str, is_alone: bool) -> int:
        owners = self.owners()
        epoch = max(owners, default=0)
        if owners and owners[epoch].get("session") == session:  # another rank of this session
            return epoch
        record = {
            "session": session,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since_unix_s": time.time(),
            "is_alone": is_alone,
        }
        while True:
            epoch += 1
            key = f"{OWNERS}{epoch:010d}"
            if self.store.put_if_absent(key, frame(json.dumps(record))) is not Outcome.EXISTS:
                self.store.delete(f"{OWNERS}{e:010d}" for e in owners if e < epoch - 8)
                return epoch
            if self.owners().get(epoch, {}).get("session") == session:
                return epoch

    def owners(self) -> dict[int, dict[str, object]]:
        """Who registered here, by epoch."""
        found: dict[int, dict[str, object]] = {}
        for info in self.store.list(OWNERS):
            try:
                content = unframe(self.store.get(info.key), where=info.key)
            except ObjectMissing:
                continue
            found[int(info.key.removeprefix(OWNERS))] = content
        return found

    def check_fence(self, session: str, *, is_alone: bool) -> None:
        """Raise Fenced when another trainer registered after `session`."""
        mine = self.epoch(session, is_alone=is_alone)
        newest = max((int(i.key.removeprefix(OWNERS)) for i in self.store.list(OWNERS)), default=0)
        if newest > mine:
            other = self.owners().get(newest, {})
            raise Fenced(
                f"{self.store.url} was taken over by a trainer on {other.get('host')} "
                f"(epoch {newest}, ours is {mine}): this save was not written"
            )

    def manifest(self, step: int) -> Manifest | None:
        try:
            return read_manifest(self.store, step)
        except ObjectMissing:
            return None

    def steps(self) -> list[int]:
        """Committed steps, newest first."""
        return newest_first(self.store)

    def pins(self) -> set[int]:
        """Steps that an operator pinned: retention leaves them alone."""
        return {int(info.key.removeprefix(PINS)) for info in self.store.list(PINS)}

    def share_layout(self, layout: Layout) -> None:
        """Let participants elsewhere know `layout`. Once for each layout."""
        with self._lock:
            if layout.digest in self._layouts:
                return
        key = f"{LAYOUTS}{layout.digest}"
        if self.store.stat(key) is None:
            self.store.put(key, layout_note(layout))
        with self._lock:
            self._layouts[layout.digest] = layout

    def layout(self, digest: str) -> Layout | None:
        with self._lock:
            known = self._layouts.get(digest)
        if known is not None:
            return known
        key = f"{LAYOUTS}{digest}"
        try:
            layout = read_layout_note(self.store.get(key), where=key)
        except ObjectMissing:
            return None
        with self._lock:
            self._layouts[digest] = layout
        return layout

    def delete_prefix(self, prefix: str) -> None:
        self.store.delete([info.key for info in self.store.list(prefix)])

    def remove_attempt(self, step: int, attempt: str, index: int) -> None:
        """Delete what one participant of a failed save wrote. Never raises."""
        prefix = f"{step_directory(step)}/{attempt}-{index:05d}-"
        try:
            self.delete_prefix(prefix)
        except Exception as error:
            event(log, "junk.kept", level=logging.WARNING, prefix=prefix, error=str(error))

    def remove_replaced(self, new: Manifest, old: Manifest | None) -> None:
        """Delete the files of a manifest that `new` replaced. The new one is committed already."""
        if old is None:
            return
        kept = {f.key for f in new.files}
        directory = step_directory(new.step)
        gone = [f"{directory}/{f.key}" for f in old.files if f.key not in kept]
        try:
            self.store.delete(gone)
        except Exception as error:
            event(log, "junk.kept", level=logging.WARNING, step=new.step, error=str(error))

    def remove_step(self, step: int) -> None:
        """Delete a step, its manifest first, so that no reader finds half of it complete."""
        directory = step_directory(step)
        self.store.delete([f"{directory}/{MANIFEST_NAME}"])
        self.delete_prefix(f"{directory}/")

    def remove_junk(self, hello: Hello, *, active: set[str], now_s: float) -> list[str]:
        """Delete files that no manifest names: of attempts that only this host took part in at
        once, of others when they are old. `active` attempts are being written by this daemon."""
        here = socket.gethostname()
        owners = {str(o["session"]): o for o in self.owners().values()}
        live = {hello.session} | {a.rpartition(".")[0] for a in active}
        gone: list[str] = []
        by_step: dict[int, list[tuple[str, float]]] = {}
        for info in self.store.list("step-"):
            step = step_of(info.key.partition("/")[0])
            if step is not None:
                by_step.setdefault(step, []).append((info.key, info.modified_s))
        for step, found in by_step.items():
            manifest = self.manifest(step)
            named = (
                {f"{step_directory(step)}/{f.key}" for f in manifest.files} if manifest else set()
            )
            for key, modified_s in found:
                name = key.partition("/")[2].removeprefix("notes/")
                session = name.partition("/")[0].partition("-")[0].rpartition(".")[0]
                if key in named or name == MANIFEST_NAME or session in live:
                    continue
                owner = owners.get(session, {})
                ours = owner.get("host") == here and owner.get("is_alone", False)
                if ours or now_s - modified_s > FOREIGN_JUNK_AGE_S:
                    gone.append(key)
        self.store.delete(gone)
        all_ours = hello.count == 1 and all(o.get("host") == here for o in owners.values())
        is_safe = isinstance(self.store, FileStore) or (all_ours and live == {hello.session})
        self.store.abort_orphans("", older_than_s=0.0 if is_safe else FOREIGN_JUNK_AGE_S)
        return gone
