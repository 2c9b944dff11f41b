"""What a training process does for its own flight record: warm it up, and dump when asked.

NCCL's watchdog dumps by itself and listens on a named pipe; other backends (gloo on CPU) do not.
`DumpOnRequest` gives every backend that pipe: a byte written to `PREFIX<rank>.pipe` makes the
process write its dump to `PREFIX<rank>` and the Python stacks of all threads to
`PREFIX<rank>.stack`, even while its main thread hangs inside a collective. torch is imported only
by these functions, and only when they run.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ftcore.base.log import event

log = logging.getLogger("flightrec.record")
_warmed = threading.Event()
PIPE_WAIT_S = 0.5  # how soon a thread that waits for requests notices that it should end


def warm_recorder() -> threading.Thread:
    """Do the slow part of the first dump now, in a background thread, and return the thread.

    The first dump with stacks of a process imports torch._dynamo, which takes seconds; when that
    happens in a hang, the dump comes too late. The thread makes no collective; it only imports and
    reads the recorder. Join it before the process ends.
    """
    thread = threading.Thread(target=_warm, name="flightrec-warm", daemon=True)
    thread.start()
    return thread


def is_warm() -> bool:
    """Whether a dump with stacks is quick by now."""
    return _warmed.is_set()


def _warm() -> None:
    began = time.monotonic()
    try:
        importlib.import_module("torch._dynamo")
        size = len(dump_bytes())
        _warmed.set()
    except Exception as error:  # a process without a recorder trains as well
        event(log, "recorder.not_warmed", level=logging.WARNING, error=str(error))
        return
    event(log, "recorder.warmed", seconds=time.monotonic() - began, bytes=size)


def dump_bytes(*, stacks: bool = True) -> bytes:
    """Return this process's flight record as the recorder pickles it: NCCL's if it has any entry,
    else the one of all other backends."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    nccl = getattr(c10d, "_dump_nccl_trace", None)
    if nccl is not None:
        record: bytes = nccl(True, stacks, False)
        if b"record_id" in record:
            return record
    other: bytes = c10d._dump_fr_trace(True, stacks, False)
    return other


def write_dump(path: str, *, stacks: bool = True) -> int:
    """Write this process's flight record to `path`, all of it or nothing; return its bytes."""
    data = dump_bytes(stacks=stacks)
    _replace(Path(path), data)
    return len(data)


def stacks_text() -> str:
    """The Python stacks of all threads of this process, in the form of faulthandler."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        name = "MainThread" if ident == main else names.get(ident, "thread")
        lines.append(f"Thread 0x{ident:016x} [{name}] (most recent call first):")
        for one in reversed(traceback.extract_stack(frame)):
            lines.append(f'  File "{one.filename}", line {one.lineno} in {one.name}')
        lines.append("")
    return "\n".join(lines)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


class DumpOnRequest:
    """Listens on `PREFIX<rank>.pipe` while its `with` block runs, and dumps on every byte.

    Any backend; several requests that arrive during one dump are one. The pipe is removed at the
    end. Raises OSError when the pipe cannot be made.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        self.path = Path(f"{prefix}{rank}")
        self.pipe = Path(f"{prefix}{rank}.pipe")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="flightrec-dump", daemon=True)
        self._fd = -1

    def __enter__(self) -> DumpOnRequest:
        self.pipe.parent.mkdir(parents=True, exist_ok=True)
        self.pipe.unlink(missing_ok=True)
        os.mkfifo(self.pipe, 0o600)
        self._fd = os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK)  # our own end keeps it open
        self._thread.start()
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._fd)
        self.pipe.unlink(missing_ok=True)

    def _listen(self) -> None:
        while not self._stop.is_set():
            ready, _, _ = select.select([self._fd], [], [], PIPE_WAIT_S)
            if ready and os.read(self._fd, 4096):
                self._dump()

    def _dump(self) -> None:
        """Stacks first: they are quick, and a dump can hang on a sick process."""
        try:
            _replace(self.path.with_name(self.path.name + ".stack"), stacks_text().encode())
            size = write_dump(str(self.path))
        except Exception as error:  # the next request may succeed; training must go on
            event(log, "dump.failed", level=logging.ERROR, path=str(self.path), error=str(error))
            return
        event(log, "dump.written", path=str(self.path), bytes=size)
