"""What the daemon of a host knows: destinations, jobs, meetings, and the memory tier."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.assemble import Cover, CoverKey, Part
from ckpt.daemon.commit import Meeting
from ckpt.daemon.memory import MemoryTier
from ckpt.daemon.metrics import Metrics
from ckpt.daemon.orders import Destination, Hello
from ckpt.daemon.ring import Ring
from ckpt.daemon.target import Target
from ckpt.plan import Layout
from ckpt.retention import Policy, StepFacts, plan_deletes
from ftcore.base.log import event

if TYPE_CHECKING:
    from ckpt.daemon.jobs import Job

log = logging.getLogger(__name__)
MeetingKey = tuple[str, int, str]
MEETINGS_KEPT = 256
COVERS_KEPT = 16
LAYOUTS_KEPT = 1024  # what participants held: for those of the newest sessions it may be asked


@dataclass(slots=True)
class Participants:
    """Who of a session is connected here, who ever was, and who will begin no save any more."""

    here: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


class Host:
    """Shared by all connections of a daemon. Every method may be called from any thread."""

    def __init__(self, *, hash_threads: int = 2) -> None:
        self.hashers = ThreadPoolExecutor(hash_threads, "ckpt-hash")
        self.memory = MemoryTier()
        self.metrics = Metrics()
        self.ring = Ring(self.memory)
        self._lock = threading.RLock()
        self._targets: dict[str, Target] = {}
        self._meetings: dict[MeetingKey, Meeting] = {}
        self._jobs: set[Job] = set()
        self._known: dict[str, Participants] = {}
        self._layouts: dict[tuple[str, int], Layout] = {}
        self._cleaned: set[tuple[str, str]] = set()
        self.idle_since_s = time.monotonic()
        self._was_busy = False
        self._covers: dict[CoverKey, Cover] = {}

    def target(self, destination: Destination) -> Target:
        """The opened destination. Opening may do I/O, so other destinations do not wait for it."""
        key = json.dumps([destination.url, dict(destination.options)], sort_keys=True, default=str)
        with self._lock:
            found = self._targets.get(key)
        if found is None:
            opened = Target(destination)
            with self._lock:
                found = self._targets.setdefault(key, opened)
        found.throttle.bytes_per_s = destination.bytes_per_s
        return found

    def attach(self, hello: Hello) -> None:
        with self._lock:
            known = self._known.setdefault(hello.session, Participants())
            known.here.add(hello.index)
            known.seen.add(hello.index)
            known.silent.discard(hello.index)

    def detach(self, hello: Hello) -> None:
        """A trainer is gone: what it had not staged will not come, and others need not wait."""
        with self._lock:
            self._known[hello.session].here.discard(hello.index)
            self.idle_since_s = time.monotonic()
        self.bury(hello.session, hello.index)

    def bury(self, session: str, index: int) -> None:
        """A participant will begin no save of this session any more: nobody waits for one that it
        has not begun."""
        with self._lock:
            self._known.setdefault(session, Participants()).silent.add(index)
            meetings = [m for (_, _, a), m in self._meetings.items() if session_of(a) == session]
        for meeting in meetings:
            with meeting.changed:
                meeting.changed.notify_all()

    def silent(self, hello: Hello, attempt: str) -> dict[int, Layout | None]:
        """Participants that have nothing to say about an attempt, and what they held if known."""
        with self._lock:
            known = self._known.get(hello.session, Participants())
            begun = {j.order.index for j in self._jobs if j.order.attempt == attempt}
            silent = known.silent - begun
            return {i: self._layouts.get((hello.session, i)) for i in sorted(silent)}

    def participants_here(self, hello: Hello) -> set[int]:
        """Participants of a session that are, or were, on this host."""
        with self._lock:
            return set(self._known.get(hello.session, Participants()).seen)

    def is_all_here(self, hello: Hello) -> bool:
        """Whether all participants of the session are, or were, on this host: no notes needed."""
        return len(self.participants_here(hello)) >= hello.count

    def meeting(self, key: MeetingKey) -> Meeting:
        with self._lock:
            meeting = self._meetings.setdefault(key, Meeting())
            for old in list(self._meetings)[: max(0, len(self._meetings) - MEETINGS_KEPT)]:
                del self._meetings[old]
        return meeting

    def remember_layout(self, hello: Hello, part: Part) -> None:
        with self._lock:
            self._layouts[hello.session, part.index] = part.layout
            for key in list(self._layouts)[: max(0, len(self._layouts) - LAYOUTS_KEPT)]:
                del self._layouts[key]

    def last_layouts(self, hello: Hello) -> dict[int, Layout]:
        with self._lock:
            return {i: v for (session, i), v in self._layouts.items() if session == hello.session}

    def covers(self) -> dict[CoverKey, Cover]:
        """What sets of files were found to cover; a few, because layouts rarely change."""
        with self._lock:
            if len(self._covers) > COVERS_KEPT:
                self._covers.clear()
            return self._covers

    def add_job(self, job: Job) -> None:
        with self._lock:
            self._jobs.add(job)
            self._was_busy = True

    def job_done(self, job: Job) -> None:
        with self._lock:
            self._jobs.discard(job)
            self.idle_since_s = time.monotonic()

    def active_attempts(self) -> set[str]:
        with self._lock:
            return {j.order.attempt for j in self._jobs}

    def is_resting(self) -> bool:
        """Whether saves ended since the last time and none is under way."""
        with self._lock:
            was_busy, self._was_busy = self._was_busy, bool(self._jobs)
            return was_busy and not self._jobs

    def is_idle(self) -> bool:
        with self._lock:
            return not self._jobs and not any(k.here for k in self._known.values())

    def check_fence(self, target: Target, hello: Hello, step: int) -> None:
        """Take ownership at the first save of a session, with the junk of dead ones removed."""
        first = (target.destination.url, hello.session)
        target.check_fence(hello.session, is_alone=self.is_all_here(hello))
        with self._lock:
            if first in self._cleaned:
                return
            self._cleaned.add(first)
        newest = next(iter(target.steps()), -1)
        if newest > step:
            facts = {"url": target.destination.url, "step": step, "newest": newest}
            event(log, "save.below_newest", level=logging.WARNING, **facts)
        try:
            gone = target.remove_junk(hello, active=self.active_attempts(), now_s=time.time())
        except Exception as error:
            event(log, "junk.kept", level=logging.WARNING, error=str(error))
        else:
            if gone:
                event(log, "junk.removed", url=target.destination.url, files=len(gone))

    def retain(self, target: Target, hello: Hello, step: int) -> None:
        """Delete what the policy does not keep. Called after a commit, never before."""
        policy = Policy.from_json(hello.retention)
        if policy.keeps_all:
            return
        pins = target.pins()
        facts = [step_facts(target, s, policy, pins) for s in target.steps()]
        for old in plan_deletes(facts, policy, now_unix_s=time.time(), just_committed=step):
            target.remove_step(old)
            event(log, "step.pruned", url=target.destination.url, step=old)


def session_of(attempt: str) -> str:
    return attempt.rpartition(".")[0]


def step_facts(target: Target, step: int, policy: Policy, pins: set[int]) -> StepFacts:
    """What the policy needs to know of a step; its manifest is read only if a rule asks."""
    manifest = target.manifest(step) if policy.needs_manifests else None
    return StepFacts(
        step=step,
        created_unix_s=manifest.created_unix_s if manifest else 0.0,
        metrics=dict(manifest.metrics) if manifest else {},
        pinned=step in pins,
    )
