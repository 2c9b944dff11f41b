"""One life of a group: from configure() to its first error. The first error wins and stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ftcore.process_group.errors import GroupError


class Link(Protocol):
    """A torch Backend, or what looks like one, of one quorum."""

    @property
    def backend(self) -> object: ...

    def cut(self) -> None:
        """Make every collective in flight end with an error, soon. Callable from any thread."""


class Life:
    """Threads meet here: the one that waits for a collective and the one that aborts the group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: Link | None = None
        self.settled = threading.Event()
        self._lock = threading.Lock()
        self._failure: GroupError | None = None

    def start(self, link: Link) -> bool:
        """Take the finished link. False when the life has ended meanwhile: the caller drops it."""
        with self._lock:
            if self._failure is None:
                self.link = link
        self.settled.set()
        return self.link is link

    def fail(self, error: GroupError) -> GroupError:
        """End this life. Returns its first error, which may be an earlier one."""
        with self._lock:
            first = self._failure is None
            if first:
                self._failure = error
            link = self.link
        self.settled.set()
        if first and link is not None:
            link.cut()
        return self.failure() or error

    def failure(self) -> GroupError | None:
        """A fresh copy of the first error: a raised one would keep the frames it passed alive."""
        if (error := self._failure) is None:
            return None
        return type(error)(str(error), remedy=error.remedy, **error.facts)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def drop_link(self) -> None:
        """Destroy the link on this thread, which may block for as long as a collective is stuck."""
        with self._lock:
            link, self.link = self.link, None
        del link


def build_in_background(
    life: Life, build: Callable[[], Link], fail: Callable[[Exception], GroupError]
) -> threading.Thread:
    """Run `build` on a thread of its own, because a peer that never comes would block it.

    When the life has ended before the link is ready, the link dies on that thread, too.
    """

    def run() -> None:
        try:
            link = build()
        except Exception as error:
            life.fail(fail(error))
            return
        if not life.start(link):
            link.cut()

    thread = threading.Thread(target=run, name="ftcore-group-build", daemon=True)
    thread.start()
    return thread


def drop_in_background(life: Life) -> threading.Thread:
    """Destroy the link of an ended life: gloo's destructor joins threads, NCCL's takes 0.5 s."""
    thread = threading.Thread(target=life.drop_link, name="ftcore-group-drop", daemon=True)
    thread.start()
    return thread
