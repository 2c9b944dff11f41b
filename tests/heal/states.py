"""States to heal, and a proxy that damages or delays what passes through it."""

import socket
import threading

import torch
from torch import nn

from ftcore.heal import HealServer, Offer, heal
from tests.statedict.models import bits, train


class Net(nn.Module):
    """About `megabytes` of parameters in matrices of 1 MiB, and a buffer."""

    def __init__(self, megabytes=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(megabytes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = x + layer(x)
        return x


def state(seed=0, megabytes=1, steps=0):
    """A model and optimizer of three times `megabytes` when it has made a step."""
    torch.manual_seed(seed)
    model = Net(megabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        train_step(model, optimizer, step)
    return {"model": model, "optim": optimizer, "step": steps, "note": f"of seed {seed}"}


def train_step(model, optimizer, seed):
    optimizer.zero_grad()
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(seed))
    model(x).pow(2).mean().backward()
    optimizer.step()


class Proxy:
    """Stands before a source: passes `passed_max` bytes, then dies; may flip one bit or trickle."""

    def __init__(self, offer, *, passed_max=None, flip_at=None, trickle_bytes=None):
        self._target = offer.address.rpartition(":")
        self._passed_max, self._flip_at, self._trickle = passed_max, flip_at, trickle_bytes
        self._passed = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.offer = Offer.from_json(
            offer.to_json() | {"address": f"127.0.0.1:{self._listener.getsockname()[1]}"}
        )
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._over.set()
        self._end()
        for thread in self._threads:
            thread.join()

    def _end(self):
        for each in [self._listener, *self._sockets]:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._target[0], int(self._target[2])))
            self._sockets += [near, far]
            for source, sink, back in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._pump, args=(source, sink, back))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source, sink, is_answer):
        try:
            while data := source.recv(self._trickle or 65536):
                sink.sendall(self._changed(data) if is_answer else data)
                if self._trickle and is_answer:
                    self._over.wait(0.02)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _changed(self, data):
        with self._lock:
            start, self._passed = self._passed, self._passed + len(data)
        if self._flip_at is not None and start <= self._flip_at < self._passed:
            data = bytearray(data)
            data[self._flip_at - start] ^= 1
            self._flip_at = None
        if self._passed_max is not None and self._passed > self._passed_max:
            self._end()
        return data


__all__ = ["HealServer", "Proxy", "bits", "heal", "state", "train", "train_step"]
