"""Listen for trainers on a Unix socket, one daemon per host and user; leave when idle."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

from ckpt.daemon.host import Host
from ckpt.daemon.metrics import serve
from ckpt.daemon.session import Session
from ckpt.wire import PROTOCOL, Channel, peer_uid
from ftcore.base.errors import BadSetting
from ftcore.base.log import event

log = logging.getLogger(__name__)
LINGER_S = 600.0


def runtime_directory() -> Path:
    """Where socket, lock and log of the daemon are: CKPT_RUNTIME_DIR, else one per user. Nobody
    else may write there, or they could stand in for the daemon."""
    base = os.environ.get("CKPT_RUNTIME_DIR") or f"/tmp/ckpt-{os.getuid()}"
    path = Path(base)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = path.stat()
    if seen.st_uid != os.getuid() or stat.S_IMODE(seen.st_mode) & 0o022:
        raise BadSetting(
            f"{path} is writable by others",
            remedy="Set CKPT_RUNTIME_DIR to a directory that only this user can write.",
        )
    return path


def socket_path() -> Path:
    path = runtime_directory() / f"daemon-{PROTOCOL}.sock"
    if len(str(path)) > 100:
        raise BadSetting(
            f"{path} is too long for a Unix socket", remedy="Set CKPT_RUNTIME_DIR to a short path."
        )
    return path


def running_pid() -> int | None:
    """The daemon of this host, or None. Its lock says whether it lives."""
    path = runtime_directory() / "daemon.lock"
    if not path.exists():
        return None
    with open(path, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0) or None
    return None


class Server:
    """Accepts connections until `linger_s` after the last trainer and upload are gone."""

    def __init__(self, host: Host, *, linger_s: float = LINGER_S) -> None:
        self._host, self._linger_s = host, linger_s
        self._lock_file = os.open(
            runtime_directory() / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        self._listener: socket.socket | None = None
        self._is_told_to_leave = False

    def try_listen(self) -> bool:
        """Become the daemon of this host. False when there is one: the lock dies with its holder,
        so a killed daemon never blocks the next."""
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.ftruncate(self._lock_file, 0)
        os.pwrite(self._lock_file, str(os.getpid()).encode(), 0)
        path = socket_path()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.settimeout(1.0)
        return True

    def run(self) -> None:
        assert self._listener is not None
        event(log, "daemon.started", pid=os.getpid(), socket=socket_path())
        while not self._should_leave():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._host.is_resting():
                    gc.collect()
                continue
            connection.setblocking(True)
            if peer_uid(connection) not in (os.getuid(), 0):
                connection.close()
                continue
            session = Session(Channel(connection), self._host)
            threading.Thread(target=session.run, name="ckpt-session", daemon=True).start()
        socket_path().unlink(missing_ok=True)
        event(log, "daemon.left", pid=os.getpid())

    def _should_leave(self) -> bool:
        idle_s = time.monotonic() - self._host.idle_since_s
        if self._is_told_to_leave:
            return not self._host.active_attempts()
        return self._host.is_idle() and idle_s > self._linger_s

    def leave(self, *_: object) -> None:
        """Leave once no upload is under way. Also the handler of SIGTERM."""
        self._is_told_to_leave = True


def serve_forever(*, linger_s: float, metrics_address: tuple[str, int] | None) -> bool:
    """Run the daemon in this process. Returns False at once when there is one already."""
    host = Host()
    server = Server(host, linger_s=linger_s)
    if not server.try_listen():
        return False
    signal.signal(signal.SIGTERM, server.leave)
    exporter = serve(host.metrics, address=metrics_address) if metrics_address else None
    if exporter is not None:
        (runtime_directory() / "metrics.address").write_text(
            "{}:{}\n".format(*exporter.server_address[:2])
        )
    try:
        server.run()
    finally:
        if exporter is not None:
            exporter.shutdown()
    return True
