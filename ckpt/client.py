"""The trainer's end of the connection to its daemon: start it, talk to it, start it again."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt.daemon.orders import Hello
from ckpt.daemon.server import runtime_directory, socket_path
from ckpt.errors import DaemonGone
from ckpt.wire import PROTOCOL, Channel, Message
from ftcore.base.log import event
from ftcore.base.retry import backoff

log = logging.getLogger(__name__)
START_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 5.0


class Refused(DaemonGone):
    """The daemon of this host is of another version."""

    remedy = "Stop the old daemon (`ckpt daemon --stop`); the next save starts a new one."
    retryable = False


class Owner(Protocol):
    """Whoever uses the connection: knows what a fresh daemon must be told, and takes answers."""

    def replay(self, send: Callable[[Message, Sequence[int]], None]) -> None: ...

    def take(self, message: Message, fds: list[int]) -> None: ...


class Client:
    """One connection that comes back when the daemon dies. `post` never blocks on uploads."""

    def __init__(self, hello: Hello, owner: Owner, *, connect: Callable[[], socket.socket]) -> None:
        self._hello, self._owner, self._connect = hello, owner, connect
        self._lock = threading.RLock()
        self._closing = False
        self._answers: dict[int, queue.SimpleQueue[tuple[Message, list[int]]]] = {}
        self._asked = 0
        self.welcome = self._connect_first()
        self._reader = threading.Thread(target=self._read, name="ckpt-events", daemon=True)

    def _connect_first(self) -> tuple[Message, list[int]]:
        """Connect and greet. A daemon that was just killed may still accept a connection."""
        deadline = time.monotonic() + START_TIMEOUT_S
        waits = backoff(random.Random(), first_s=0.01, max_s=0.2)
        while True:
            self._channel = Channel(self._connect())
            try:
                return self._greet()
            except Refused:
                raise
            except (OSError, DaemonGone):
                self._channel.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(next(waits))

    def start(self) -> None:
        """Begin to hand answers to the owner."""
        self._reader.start()

    def post(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send without an answer. When the daemon is gone the owner's replay says it again."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(message, fds)

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Hold replays off, so that what is noted and what is posted stay the same."""
        with self._lock:
            yield

    def ask(self, message: Message, *, timeout_s: float = 30.0) -> tuple[Message, list[int]]:
        """Send and wait for the answer. Raises DaemonGone when there is none in time."""
        with self._lock:
            self._asked += 1
            number = self._asked
            answers: queue.SimpleQueue[tuple[Message, list[int]]] = queue.SimpleQueue()
            self._answers[number] = answers
        self.post({**message, "ask": number})
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty as error:
            raise DaemonGone(f"no answer from the daemon within {timeout_s:g} s") from error
        finally:
            self._answers.pop(number, None)

    def sit(self, hello: Hello) -> tuple[Message, list[int]]:
        """Have another seat; return the slots that are there."""
        self._hello = hello
        return self.ask({"kind": "seat", "hello": hello.to_json()})

    def join(self, hello: Hello, *, gone: Sequence[int]) -> None:
        """Be a participant of another session from now on."""
        with self._lock:
            self._hello = hello
            self.post({"kind": "join", "hello": hello.to_json(), "gone": list(gone)})

    def close(self, *, keep_memory: bool) -> None:
        with self._lock:
            self._closing = True
        self.post({"kind": "bye", "keep_memory": keep_memory})
        self._channel.finish()
        if self._reader.ident is not None:
            self._reader.join(timeout=LEAVE_TIMEOUT_S)  # the daemon has let go of our memory then
        self._channel.close()

    def _greet(self) -> tuple[Message, list[int]]:
        self._channel.send({"kind": "hello", "protocol": PROTOCOL, "hello": self._hello.to_json()})
        received = self._channel.receive()
        if received is None:
            raise DaemonGone("the daemon closed the connection")
        if received[0]["kind"] == "refused":
            raise Refused(received[0]["error"])
        return received

    def _read(self) -> None:
        while True:
            received = self._channel.receive()
            if received is None:
                if self._closing or not self._reconnect():
                    return
                continue
            message, fds = received
            answers = self._answers.get(message.get("ask", 0))
            if answers is not None:
                answers.put((message, fds))
            else:
                self._owner.take(message, fds)

    def _reconnect(self) -> bool:
        """Start a new daemon and tell it what the old one had not finished."""
        started = time.monotonic()
        waits = backoff(random.Random(), first_s=0.01, max_s=0.2)
        while not self._closing:
            try:
                self._attach_again()
            except (OSError, DaemonGone) as error:  # a dying daemon may still accept
                if time.monotonic() - started > START_TIMEOUT_S:
                    self._owner.take({"kind": "gone", "error": str(error)}, [])
                    return False
                time.sleep(next(waits))
            else:
                event(log, "daemon.respawned", seconds=time.monotonic() - started)
                return True
        return False

    def _attach_again(self) -> None:
        with self._lock:
            self._channel.close()
            self._channel = Channel(self._connect())
            _, fds = self._greet()
            for fd in fds:
                os.close(fd)
            self._owner.replay(self._channel.send)


def connect_or_spawn(*, linger_s: float, metrics_address: str) -> socket.socket:
    """A connection to the daemon of this host, which is started if there is none."""
    deadline = time.monotonic() + START_TIMEOUT_S
    waits = backoff(random.Random(), first_s=0.005, max_s=0.05)
    child: subprocess.Popen[bytes] | None = None
    with _one_starter() as may_start:
        while time.monotonic() < deadline:
            connected = _try_connect()
            if connected is not None:
                return connected
            if may_start and (child is None or child.poll() is not None):
                child = _spawn(linger_s, metrics_address)
            time.sleep(next(waits))
    raise DaemonGone(
        f"the upload daemon did not start within {START_TIMEOUT_S:g} s; its log is {log_path()}"
    )


def log_path() -> Path:
    return runtime_directory() / "daemon.log"


def _try_connect() -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(socket_path()))
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        sock.close()
        return None
    return sock


@contextlib.contextmanager
def _one_starter() -> Iterator[bool]:
    """True for one of the ranks of a host that start together; the others wait for its daemon."""
    with open(runtime_directory() / "start.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _spawn(linger_s: float, metrics_address: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    command = [sys.executable, "-m", "ckpt.daemon", "--linger-s", str(linger_s)]
    command += ["--metrics-address", metrics_address] if metrics_address else []
    with open(log_path(), "ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )


def connect_inline() -> socket.socket:
    """A daemon in threads of this process, for tests and where no process may be started."""
    from ckpt.daemon.host import Host
    from ckpt.daemon.session import Session

    if not _inline_hosts:
        _inline_hosts.append(Host())
    ours, theirs = socket.socketpair()
    session = Session(Channel(theirs), _inline_hosts[0])
    threading.Thread(target=session.run, name="ckpt-inline", daemon=True).start()
    return ours


_inline_hosts: list[Any] = []
