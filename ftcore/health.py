"""Prove that this rank can compute, remember, write and tell the time, before its group may join.

A check looks at the machine and returns what is wrong in one sentence, or an empty string. Whoever
computes wrong numbers in silence does more harm than whoever is missing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import torch
import torch.distributed as dist

from ftcore.base.log import event
from ftcore.link import log

WIDTH = 256
MEMORY_BYTES = 16 << 20
DISK_FREE_BYTES = 64 << 20
CLOCK_LIMIT_S = 30.0  # the Date of HTTP has whole seconds; logs and leases bear half a minute
_PATTERN = 0x5555_5555_5555_5555


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """The rank that is looked at. device: where its model lives."""

    device: torch.device
    ranks: int = 1
    lighthouse: tuple[str, ...] = ()


Check = Callable[[Patient], str]


def matmul(patient: Patient) -> str:
    """Whole numbers as float32 multiply exactly, so one wrong bit is seen. The product is compared
    by a vector in int64 arithmetic (Freivalds 1977), which takes another path through the chip."""
    count = torch.arange(WIDTH * WIDTH, dtype=torch.int64)
    left, right = ((count % m - m // 2).view(WIDTH, WIDTH) for m in (7, 5))
    product = left.float().to(patient.device) @ right.float().to(patient.device)
    probe = torch.arange(WIDTH, dtype=torch.int64) % 11 - 5
    wrong = (product.cpu().to(torch.int64) @ probe != left @ (right @ probe)).sum()
    return f"{int(wrong)} of {WIDTH} rows of a product on {patient.device} differ" if wrong else ""


def memory(patient: Patient) -> str:
    """Each bit of a buffer holds a one and a zero."""
    buffer = torch.empty(MEMORY_BYTES // 8, dtype=torch.int64, device=patient.device)
    for pattern in (_PATTERN, ~_PATTERN):
        buffer.fill_(pattern)
        wrong = int((buffer != pattern).sum())
        if wrong:
            return f"{wrong} words of {MEMORY_BYTES >> 20} MiB on {patient.device} do not hold"
    return ""


def disk(patient: Patient) -> str:
    """The temporary folder has space, and gives back what was written and synced."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < DISK_FREE_BYTES:
        return f"{folder} has {free >> 20} MiB free, less than {DISK_FREE_BYTES >> 20}"
    written = bytes(range(256)) * 256
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        return "" if file.read() == written else f"{folder} gave back other bytes than were written"


def clock(patient: Patient) -> str:
    """The wall clock is that of the lighthouse. One that does not answer in plain HTTP is not
    compared with."""
    for endpoint in patient.lighthouse:
        asked = time.time()
        try:
            with urllib.request.urlopen(f"http://{endpoint}/healthz", timeout=1.0) as answer:
                theirs = parsedate_to_datetime(answer.headers["Date"]).timestamp()
        except (OSError, ValueError, TypeError):
            continue
        ahead_s = asked - theirs
        if abs(ahead_s) > CLOCK_LIMIT_S:
            return f"the clock is {ahead_s:.0f} s ahead of the lighthouse's, {endpoint}"
        return ""
    return ""


def local_collective(patient: Patient) -> str:
    """The ranks of this group add up what they know of each other, over the group's own network."""
    if patient.ranks == 1 or not dist.is_initialized() or dist.get_world_size() != patient.ranks:
        return ""
    device = patient.device if dist.get_backend() == "nccl" else torch.device("cpu")
    total = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(total)
    expected = patient.ranks * (patient.ranks + 1) / 2
    wrong = int((total != expected).sum())
    return f"{wrong} of 1024 sums over the group's {patient.ranks} ranks are wrong" if wrong else ""


CHECKS: tuple[Check, ...] = (matmul, memory, disk, clock)


def examine(checks: Iterable[Check], patient: Patient) -> str:
    """The first thing that is wrong, or an empty string. All ranks of a group take part in the
    collective, whatever was found before, so that no rank waits for one that gave up."""
    began = time.perf_counter()
    found = [_found(check, patient) for check in checks]
    if found:
        found.append(_found(local_collective, patient))
    unfit = next(filter(None, found), "")
    event(log, "health.checked", seconds=time.perf_counter() - began, unfit=unfit)
    return unfit


def _found(check: Check, patient: Patient) -> str:
    """A check that cannot be done is one that failed."""
    try:
        wrong = check(patient)
    except Exception as error:  # a plug-in may raise anything
        wrong = f"{type(error).__name__}: {error}"
    return f"health check {getattr(check, '__name__', check)}: {wrong}" if wrong else ""
