"""Notice a step that takes far too long, find out who holds it up, and give up this group if it
is one of its own ranks.

Every manager looks for itself, at all ranks of the quorum or at those around its own, and judges
its own ranks only: it alone knows that a rank heals or runs its first step. Two looks in a row must
agree, because one cannot tell slow from stuck. A rank that does not come out of a step that has
been aborted needs no comparison: it waits for nobody any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcore.base.log import event
from ftcore.base.machine import this_machine
from ftcore.daemon.group import Group
from ftcore.daemon.look import Order
from ftcore.wire.messages import Quorum, show_id

log = logging.getLogger("ftcore.daemon")

FIRST_STEP = 4  # times as patient: a first step compiles, loads and allocates
USUAL = 5  # a step that takes so many times the longest one so far is too long
LOOK_AGAIN = 0.25  # of the time limit; doubled while looks find nobody
LOOK_TIMEOUT_S = 60.0
SURE = 0.6  # confidence from which a verdict costs a rank its life
FOLDERS_MAX = 8  # of past hangs that are kept

Attempt = tuple[int, int]  # quorum id and step


@dataclass(frozen=True, slots=True, kw_only=True)
class Guilt:
    """One of our own ranks holds the others up."""

    rank: int  # within this replica group
    call: tuple[object, ...]  # what two looks must agree on
    why: str


def limit_s(after_s: float, *, longest_s: float, is_first: bool) -> float:
    """How long a step may take before anybody is looked at."""
    return max(after_s * (FIRST_STEP if is_first else 1), USUAL * longest_s)


def accuse(report: Mapping[str, Any], *, position: int, groups: int, ranks: int) -> Guilt | None:
    """Which of the ranks of the group at `position` holds up the others, if any.

    Nobody when more than half of the groups are named: then the job is slow, not one of them.
    """
    sure = [c for c in report["culprits"] if c["is_hanging"] and c["confidence"] >= SURE]
    named = {culprit["rank"] // ranks for culprit in sure}
    if groups > 1 and 2 * len(named) > groups:
        return None
    own = (culprit for culprit in sure if culprit["rank"] // ranks == position)
    first = next(own, None)
    if first is None:
        return None
    at = f" at {first['where']}" if first["where"] else ""
    return Guilt(
        rank=first["rank"] % ranks,
        call=(first["rank"], first["kind"], first["group"], first["seq"]),
        why=f"hangs{at}: {first['because'][0]}",
    )


class HangWatch:
    """Watches the steps of one group. `run` goes on until it is cancelled."""

    def __init__(self, group: Group, *, after_s: float) -> None:
        self._group, self._after_s = group, after_s
        self._attempt: Attempt | None = None
        self._began = self._longest_s = self._pause_s = 0.0
        self._is_first = True  # this life has not committed a step yet
        self._before: tuple[object, ...] | None = None

    async def run(self) -> None:
        clock = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._after_s / 10)
            self._see(self._running(), clock.time())
            limit = limit_s(self._after_s, longest_s=self._longest_s, is_first=self._is_first)
            if self._attempt is None or clock.time() < self._began + limit + self._pause_s:
                continue
            if await self._looked_through(self._attempt):
                return

    def _running(self) -> Attempt | None:
        """The attempt that runs, unless a rank of ours heals in it: that takes its time."""
        core = self._group.core
        if core is None or core.running is None or core.is_healing:
            return None
        return core.running.quorum.quorum_id, core.running.step

    def _see(self, attempt: Attempt | None, now: float) -> None:
        if attempt == self._attempt:
            return
        if self._attempt is not None and attempt is not None and attempt[1] > self._attempt[1]:
            self._is_first = False
            self._longest_s = max(self._longest_s, now - self._began)
        self._attempt, self._began = attempt, now
        self._pause_s, self._before = 0.0, None

    async def _looked_through(self, attempt: Attempt) -> bool:
        """Look once. Return whether this group was given up."""
        core = self._group.core
        assert core is not None and core.running is not None
        quorum = core.running.quorum
        answer = await look_at(self._group, quorum)
        if self._running() != attempt:
            return False  # it went on meanwhile
        position = quorum.replica_ids.index(self._group.config.replica_id)
        guilt = self._stuck_alone(attempt, answer["stands"]) or (
            accuse(
                answer["report"],
                position=position,
                groups=len(quorum.members),
                ranks=self._group.config.ranks,
            )
            if answer["report"]
            else None
        )
        if guilt is not None and guilt.call == self._before:
            self._give_up(guilt)
            return True
        pause = LOOK_AGAIN * self._after_s
        self._pause_s += pause if guilt is not None else max(pause, self._pause_s)
        self._before = guilt.call if guilt is not None else None
        return False

    def _stuck_alone(self, attempt: Attempt, stands: Mapping[str, str]) -> Guilt | None:
        """A rank that does not come out of an aborted step, though whatever it waited for ended."""
        late = self._group.late_in(attempt)
        if not late:
            return None
        core, rank = self._group.core, late[0]
        assert core is not None and core.running is not None
        position = core.running.quorum.replica_ids.index(self._group.config.replica_id)
        at = stands.get(str(position * self._group.config.ranks + rank), "")
        why = f"hangs{' at ' + at if at else ''}: it does not come out of a step that was aborted"
        return Guilt(rank=rank, call=("aborted", *attempt, rank), why=why)

    def _give_up(self, guilt: Guilt) -> None:
        hello = self._group.ranks[guilt.rank].hello
        if hello.machine == this_machine():
            self._group.condemned = hello.pid
        self._group.end(f"rank {guilt.rank} (pid {hello.pid}) {guilt.why}")


async def look_at(group: Group, quorum: Quorum) -> dict[str, Any]:
    """Run `ftcore.daemon.look` and return what it says; of nothing to say, an empty report."""
    order = order_of(group, quorum)
    command = [sys.executable, "-m", "ftcore.daemon.look", order.to_json()]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            output, _ = await child.communicate()
        answer: dict[str, Any] = json.loads(output)
    except (TimeoutError, ValueError):
        answer = {"report": None, "stands": {}, "why": "the look at the ranks failed"}
    finally:
        if child.returncode is None:
            child.kill()
    report = answer["report"]
    summary = report["summary"] if report else answer.get("why", "")
    event(log, "hang.looked", summary=summary, step=group.step, folder=order.folder)
    return answer


def order_of(group: Group, quorum: Quorum) -> Order:
    """Our own ranks, and those of all groups whose addresses we were given: not in large jobs."""
    config = group.config
    position = quorum.replica_ids.index(config.replica_id)
    own = tuple(group.ranks[rank].hello.heal_address for rank in range(config.ranks))
    addresses, names = {}, {}
    for at, member in enumerate(quorum.members):
        for rank, address in enumerate(own if at == position else member.heal_addresses):
            addresses[at * config.ranks + rank] = address
            names[at * config.ranks + rank] = f"{member.replica_id} rank {rank}"
    return Order(
        job=config.job,
        quorum_id=quorum.quorum_id,
        ranks=config.ranks,
        addresses=addresses,
        names=names,
        pids={
            position * config.ranks + rank: known.hello.pid
            for rank, known in group.ranks.items()
            if known.hello.machine == this_machine()
        },
        folder=str(_folder(config.job, config.replica_id, quorum.quorum_id, group.step)),
    )


def _folder(job: str, replica_id: str, quorum_id: int, step: int) -> Path:
    """Where the records of this hang stay; the oldest of earlier ones make room."""
    default = f"{tempfile.gettempdir()}/ftcore-hangs-{os.getuid()}"
    parent = Path(os.environ.get("FTCORE_HANG_DIR") or default) / _safe(job, replica_id)
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    past = sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for old in past[: -FOLDERS_MAX + 1]:
        shutil.rmtree(old, ignore_errors=True)
    return parent / f"quorum_{show_id(quorum_id)}_step_{step}"


def _safe(*parts: str) -> str:
    return "_".join("".join(c if c.isalnum() or c in "-." else "_" for c in p) for p in parts)
