"""A job of real processes: one lighthouse, and replica groups that tell what happens to them."""

import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from ftcore.demo.processes import Lighthouse

HANG_S = 90.0
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "ftcore.manager", "tests.manager.trainer"])


class Group:
    """One life of one replica group of one rank, or of one rank of it."""

    def __init__(self, name, config, main=None):
        self.name, self.events = name, []
        self._inbox = queue.SimpleQueue()
        here, there = _PROCESSES.Pipe(duplex=False)
        from tests.manager import trainer

        arguments = (there, {**config, "replica_id": name})
        self.process = _PROCESSES.Process(target=main or trainer.main, args=arguments)
        self.process.start()
        there.close()
        threading.Thread(target=self._read, args=(here,), daemon=True).start()

    def _read(self, pipe):
        try:
            while True:
                self._inbox.put(pipe.recv())
        except (EOFError, OSError, ConnectionError):
            self._inbox.put({"event": "ended", "at": time.time()})

    def wait(self, event, **facts):
        """The next event of this name with these facts; those before it are kept in `events`."""
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                got = self._inbox.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{self.name} never said {event} {facts}: {self.events[-5:]}"
                ) from None
            self.events.append(got)
            if got["event"] == event and all(got.get(k) == v for k, v in facts.items()):
                return got
            assert got["event"] != "ended", f"{self.name} ended: {self.events[-3:]}"

    def finish(self):
        """Its final weights, as SHA-256."""
        return self.wait("finished")["sha"]

    def said(self, event):
        return [e for e in self.events if e["event"] == event]

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)


class Job:
    def __init__(self, folder: Path, *, replicas_min=1, main=None, **config):
        self.folder, self.replicas_min, self.main = folder, replicas_min, main
        self.groups = []
        self.lighthouse = self._light(port=0)
        self.config = {"steps": 80, "shards": 3, "lighthouse": self.lighthouse.address, **config}

    def _light(self, *, port):
        return Lighthouse(
            self.folder, replicas_min=self.replicas_min, log_level="WARNING", port=port
        )

    def start(self, name, **config):
        group = Group(name, {**self.config, **config}, self.main)
        self.groups.append(group)
        return group

    def start_all(self, *names, **config):
        return [self.start(name, **config) for name in names]

    def kill_lighthouse(self):
        self.lighthouse.kill()

    def restart_lighthouse(self):
        self.lighthouse = self._light(port=int(self.lighthouse.address.rpartition(":")[2]))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for group in self.groups:
            with suppress(ProcessLookupError):  # it may have ended by itself
                group.signal(signal.SIGCONT)
                group.kill()
            group.process.join()
        self.lighthouse.kill()


def together(*groups):
    """Wait until all of them have committed a step with all the others."""
    names = tuple(sorted(group.name for group in groups))
    for group in groups:
        group.wait("step.committed", members=names)


class Events(logging.Handler):
    """Sends log records of ftcore as dictionaries over a pipe."""

    def __init__(self, pipe):
        super().__init__()
        self._pipe, self._lock = pipe, threading.Lock()

    def emit(self, record):
        self.say(record.getMessage(), at=record.created, **getattr(record, "facts", {}))

    def say(self, event, **facts):
        with self._lock:
            self._pipe.send({"event": event, "at": time.time(), **facts})
