"""Hear that this machine is about to be taken away, and let its replica group leave in good order.

A thread of its own listens, so a notice is heard while the trainer waits in a collective: Python
runs signal handlers only on the main thread, between two of its instructions.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ftcore.base.log import event
from ftcore.checkpoints import JobCheckpoints
from ftcore.notice import CLOUDS, Cloud, Notice, Preemption

log = logging.getLogger("ftcore")

_ANSWER_TIMEOUT_S = 1.0  # a metadata server is on the same machine
_TOKEN_TTL_S = 21600


class Departure:
    """The notice of one rank. Any rank's notice makes its whole group leave.

    on_notice: called on the training thread when the group has left the quorum, so that nobody
        waits for it; `notice.left_s(time.monotonic())` says how long it may take.
    """

    def __init__(
        self, preemption: Preemption | None, on_notice: Callable[[Notice], None] | None
    ) -> None:
        self.notice: Notice | None = None
        self._on_notice = on_notice
        self._leave: Callable[[str], None] | None = None
        self._ears = None if preemption is None else Ears(preemption, heard=self._heard)

    def attached(self, leave: Callable[[str], None]) -> None:
        """From now on `leave(reason)` may be called, from any thread."""
        self._leave = leave
        if self.notice is not None:
            leave(self.notice.reason)

    def _heard(self, notice: Notice) -> None:
        event(log, "notice.heard", reason=notice.reason, left_s=notice.left_s(time.monotonic()))
        self.notice = notice
        if self._leave is not None:
            self._leave(notice.reason)

    def left(self, checkpoints: JobCheckpoints | None) -> None:
        """The group is out: save what fits into the rest of the notice."""
        notice = self.notice
        if notice is None:
            return
        if checkpoints is not None:
            checkpoints.save_within(notice.left_s(time.monotonic()))
        if self._on_notice is not None:
            self._on_notice(notice)

    def close(self) -> None:
        self._leave = None
        if self._ears is not None:
            self._ears.close()
            self._ears = None


class Ears:
    """Listens until the first notice, then waits for its end; `close()` joins the thread."""

    def __init__(self, preemption: Preemption, *, heard: Callable[[Notice], None]) -> None:
        self._preemption, self._heard = preemption, heard
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._has_sigterm = preemption.sigterm and self._take_sigterm()
        self._is_closed = False
        self._metadata = None
        if preemption.cloud is not None:
            self._metadata = Metadata(CLOUDS[preemption.cloud], preemption.metadata_url)
        self._thread = threading.Thread(target=self._listen, name="ftcore-notice", daemon=True)
        self._thread.start()

    def _take_sigterm(self) -> bool:
        """Only when nobody else has it. The wake-up descriptor is written by the C handler, at once
        whatever the main thread does; an event loop that has its own keeps it."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            event(log, "notice.sigterm_left_alone", level=logging.DEBUG)
            return False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _swap_wakeup_fd(-1, self._pipe[1])
        return True

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._wake(number)

    def _wake(self, number: int) -> None:
        try:
            os.write(self._pipe[1], bytes([number]))
        except OSError:
            pass  # full: it will be read

    def _listen(self) -> None:
        while not self._is_closed:
            if reason := self._wait():
                notice = Notice(reason=reason, ends_at=self._preemption.ends_at(time.monotonic()))
                self._heard(notice)
                self._wait_for_end(notice)
                return

    def _wait(self) -> str:
        """One wait of `poll_s` at most. Return the reason of a notice, or an empty string."""
        asks = self._preemption.file is not None or self._metadata is not None
        if signal.SIGTERM in self._signals(self._preemption.poll_s if asks else None):
            return "SIGTERM"
        if reason := _reason_in(self._preemption.file):
            return reason
        return self._metadata.ask() if self._metadata is not None else ""

    def _signals(self, timeout_s: float | None) -> bytes:
        ready, _, _ = select.select([self._pipe[0]], [], [], timeout_s)
        return os.read(self._pipe[0], 1 << 12) if ready else b""

    def _wait_for_end(self, notice: Notice) -> None:
        """Whoever sent SIGTERM and is still waited for then gets what SIGTERM usually does."""
        while not self._is_closed and (left_s := notice.left_s(time.monotonic())) > 0:
            self._signals(left_s)
        if not self._is_closed and notice.reason == "SIGTERM":
            event(log, "notice.ended", level=logging.WARNING, reason=notice.reason)
            _end_by_sigterm()

    def close(self) -> None:
        """Called on the main thread when the signal was taken: it is given back."""
        self._is_closed = True
        self._wake(0)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._give_back_sigterm()
        for descriptor in self._pipe:
            os.close(descriptor)

    def _give_back_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not self._has_sigterm or not is_main:
            return
        _swap_wakeup_fd(self._pipe[1], -1)
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _swap_wakeup_fd(expected: int, new: int) -> None:
    """Set it, unless it is somebody else's."""
    old = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
    if old != expected:
        signal.set_wakeup_fd(old)


def _end_by_sigterm() -> None:
    """End this process now. Only the main thread may put the default action back, and it may be
    caught in a collective; so the exit status of a shell says what happened."""
    os._exit(128 + signal.SIGTERM)


def _reason_in(file: Path | str | None) -> str:
    """The first line of a file that exists; a word of our own when it is empty."""
    if file is None:
        return ""
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            return lines.readline(200).strip() or f"{file} exists"
    except OSError:
        return ""


class Metadata:
    """The metadata server of this machine. One that does not answer says nothing."""

    def __init__(self, cloud: Cloud, url: str) -> None:
        self._cloud, self._base = cloud, (url or cloud.base).rstrip("/")
        self._token = ""

    def ask(self) -> str:
        """The reason of a notice, or an empty string."""
        cloud = self._cloud
        if cloud.token_path and not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            status, body = _fetch("PUT", self._base + cloud.token_path, headers)
            self._token = body if status == 200 else ""
        token = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        status, body = _fetch("GET", self._base + cloud.path, {**cloud.headers, **token})
        if status == 401:
            self._token = ""
        return cloud.read(status, body)


def _fetch(method: str, url: str, headers: dict[str, str]) -> tuple[int, str]:
    """HTTP status and body; status 0 when there is no answer. Never through a proxy."""
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            return int(answer.status), answer.read(1 << 16).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except (OSError, ValueError):
        return 0, ""
