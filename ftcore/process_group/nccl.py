"""A group over NCCL: aborted from threads of its own, and believed only after a canary came back.

What hardware does (H200, NCCL 2.28): abort() takes 0.5 s whatever the state, and never returns for
an idle group while another one hangs, so each abort has a thread and nobody waits for it. After a
peer's death a collective may look complete (over sockets) or run for ever (over NVLink), so wait()
and is_completed() prove nothing: settle() does, by one more tiny sum that only living members can
make right. Initialising against an absent peer leaks its thread, so it never happens on the
caller's. Never call ProcessGroupNCCL.shutdown() here: with abort() after it the heap is corrupted.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ftcore.base.errors import BadSetting
from ftcore.process_group.base import Group, Quorum
from ftcore.process_group.errors import CollectiveFailed
from ftcore.process_group.life import Life
from ftcore.process_group.naming import name_in_records
from ftcore.process_group.store import connect_store

# torch's own watchdog would end the process, or wait, where we abort and go on.
_WATCHDOG_OFF = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
_NEVER = timedelta(days=365)  # our settle() and the manager's abort() are the time limits
_POLL_FIRST_S, _POLL_MAX_S = 20e-6, 1e-3


def nccl_is_available() -> bool:
    """Whether this torch has NCCL and this machine a GPU. Wheels for CPU have neither."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


class NcclLink:
    """The NCCL backend of one quorum."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def cut(self) -> None:
        """Return at once: abort() waits for whatever runs on the device, or for 0.5 s at best."""
        backend = self.backend
        threading.Thread(target=lambda: backend.abort(), name="ftcore-nccl-abort").start()


class NcclGroup(Group):
    """For tensors on `device`, this rank's GPU. A Work's wait() orders streams and does not block:
    call settle() before a vote."""

    backend_name = "nccl"

    def __init__(self, *, device: torch.device | None = None, hold_errors: bool = False) -> None:
        super().__init__(hold_errors=hold_errors)
        if not nccl_is_available():
            raise BadSetting(
                "NCCL is not available: this torch or this machine has no GPU support",
                remedy="Use GlooGroup, or install a torch build for CUDA on a machine with a GPU.",
            )
        for name, value in _WATCHDOG_OFF.items():
            os.environ.setdefault(name, value)
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._side: Any = None

    def _connect(self, quorum: Quorum) -> NcclLink:
        """Runs on the builder's thread. The first sum makes the communicator, here and now."""
        torch.cuda.set_device(self.device)
        client = connect_store(quorum.store_address, timeout_s=quorum.timeout_s)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        backend = dist.ProcessGroupNCCL(
            dist.PrefixStore(quorum.prefix, client), quorum.rank, quorum.world_size, options
        )
        name_in_records(backend, "cuda", quorum.prefix)
        stream = self._idle_stream()
        with torch.cuda.stream(stream):
            canary = _send_canary(backend, self.device)
        stream.synchronize()
        if canary.item() != quorum.world_size:
            raise RuntimeError(f"{canary.item():g} of {quorum.world_size} members answered")
        return NcclLink(backend)

    def _idle_stream(self) -> Any:
        """One stream for all quorums, since torch keeps memory for each that was ever used; but
        not while something is stuck on it."""
        if self._side is None or not self._side.query():
            self._side = torch.cuda.Stream(self.device)
        return self._side

    def settle(self) -> None:
        """Wait until everything issued so far has ended on the device and all members are alive.

        Raises the group's error, CollectiveFailed after its time limit. Keeps looking for an
        abort() meanwhile, so a peer that hangs costs no more than it takes to notice it.
        """
        super().settle()
        life, quorum = self._life, self._quorum
        if quorum is None or quorum.world_size == 1 or (link := life.link) is None:
            torch.cuda.current_stream(self.device).synchronize()
            return
        try:
            canary = _send_canary(link.backend, self.device)
            _poll_event(
                _record(self.device), lambda: _is_over(life, link.backend), quorum.timeout_s
            )
            if not life.has_failed and (answers := canary.item()) != quorum.world_size:
                raise RuntimeError(f"{answers:g} of {quorum.world_size} members answered")
        except (RuntimeError, TimeoutError) as error:
            life.fail(CollectiveFailed(f"settling {life.name} failed: {error}"))
        super().settle()


def warm_up(device: torch.device) -> None:
    """Use NCCL once, alone: later communicators come up in 0.05-0.2 s instead of 0.3-0.55 s.
    For spares, before they are needed."""
    backend = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    _send_canary(backend, device)
    torch.cuda.synchronize(device)
    backend.abort()


def _send_canary(backend: Any, device: torch.device) -> torch.Tensor:
    canary = torch.ones(1, device=device)
    backend.allreduce([canary], c10d.AllreduceOptions()).wait()
    return canary


def _record(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _is_over(life: Life, backend: Any) -> bool:
    if (code := str(backend.get_error())) != "ErrorType.SUCCESS":
        raise RuntimeError(f"NCCL reports {code}")
    return life.has_failed


def _poll_event(event: Any, is_over: Any, timeout_s: float) -> None:
    """Wait for the event or for `is_over()`, without blocking in CUDA, which nobody could end."""
    deadline, pause_s = time.monotonic() + timeout_s, _POLL_FIRST_S
    while not event.query() and not is_over():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the device was not done after {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_MAX_S)
