"""Candidates with wrong clocks, pauses and a network that loses replies, all from one seed."""

import heapq
import random
from dataclasses import dataclass, replace

from lighthouse.lease import candidate as pure
from lighthouse.lease.api import Grant, Holder, Timing
from lighthouse.lease.candidate import Candidate, Move, Sleep
from lighthouse.lease.observe import Sighting


@dataclass
class Store:
    """The lease as one object. `ends_at` is used by a store that ends leases itself (etcd)."""

    term: int = 0
    identity: str = ""
    beat: int = 0
    ends_at: float = 0.0
    wrote_term: int = 0

    def holder(self):
        return Holder(term=self.term, identity=self.identity, address=self.identity)


class Process:
    """One lighthouse: a pure candidate, its own clock, and whether it is being executed at all."""

    def __init__(self, sim, name, rate):
        self.sim, self.name, self.rate = sim, name, rate
        self.offset = sim.rng.uniform(0, 1e6)
        self.lives, self.resumes_at = 0, 0.0
        self.begin()

    def begin(self):
        self.lives += 1
        self.candidate = Candidate(timing=self.sim.timing, identity=f"{self.name}/{self.lives}")
        self.candidate = replace(self.candidate, next_at=self.now())
        self.sighting = Sighting()
        self.pending = None

    def now(self):
        return self.offset + self.rate * self.sim.now

    def leads(self):
        return self.candidate.leads(self.now())


class Sim:
    def __init__(self, seed, *, timing=None, observed=False):
        self.rng = random.Random(seed)
        self.timing, self.observed = timing or Timing(), observed
        self.now, self.heap, self.count = 0.0, [], 0
        self.store, self.store_rate = Store(), self.rng.choice([0.95, 1, 1.05])
        self.loss = self.rng.choice([0, 0.05, 0.3])
        self.faults, self.terms, self.leaders = True, [], 0
        self.processes = [
            Process(self, f"p{i}", self.rng.choice([0.95, 1, 1.05])) for i in range(3)
        ]
        for process in self.processes:
            self.at(0, self.turn, process)
            self.at(0, self.write_now_and_then, process, process.lives)
        self.at(1, self.chaos)

    def at(self, delay_s, function, *arguments):
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, function, arguments))

    def run(self, until):
        while self.heap and self.heap[0][0] <= until:
            self.now, _, function, arguments = heapq.heappop(self.heap)
            function(*arguments)
            self.check()
        self.now = until

    def check(self):
        leaders = [p.name for p in self.processes if p.leads()]
        assert len(leaders) <= 1, f"{leaders} lead at once at {self.now:.3f} s"
        self.leaders = max(self.leaders, len(leaders))

    def awake(self, process, function, *arguments):
        """Run now, or when a paused process goes on."""
        if self.now < process.resumes_at:
            self.at(process.resumes_at - self.now, self.awake, process, function, *arguments)
        else:
            function(*arguments)

    # A process executes its next move; the request and the reply take time and may be lost.

    def turn(self, process):
        self.awake(process, self._turn, process)

    def _turn(self, process):
        if process.pending is not None:
            return
        match pure.next_move(process.candidate, process.now()):
            case Sleep(until=until):
                self.at((until - process.now()) / process.rate + 1e-6, self.turn, process)
            case Move.STEP_DOWN:
                process.candidate = pure.stepped_down(
                    process.candidate, process.now(), self.rng.random()
                )
                self.at(0, self.turn, process)
            case move:
                self.request(process, move)

    def request(self, process, move):
        life, asked_at = process.lives, process.now()
        process.pending = asked_at
        grant, term_min = process.candidate.grant, process.candidate.term_min
        if self.lost():
            pass
        elif move is Move.ACQUIRE:
            self.at(self.delay(), self.acquire, process, life, asked_at, term_min)
        else:
            self.at(self.delay(), self.renew, process, life, asked_at, grant)
        self.at(self.timing.try_timeout_s, self.turn_after_timeout, process, life, asked_at)

    def turn_after_timeout(self, process, life, asked_at):
        self.reply(process, life, asked_at, lambda c, now, u: pure.unanswered(c, now, u))

    def reply(self, process, life, asked_at, change):
        self.awake(process, self._reply, process, life, asked_at, change)

    def _reply(self, process, life, asked_at, change):
        if process.lives != life or process.pending != asked_at:
            return
        process.pending = None
        process.candidate = change(process.candidate, process.now(), self.rng.random())
        self.turn(process)

    # The store applies requests one after another.

    def acquire(self, process, life, asked_at, term_min):
        store, identity = self.store, f"{process.name}/{life}"
        if self.held(process) and store.identity != identity:
            answer = store.holder()
        else:
            term = max(store.term + 1, term_min)
            assert term > store.term
            self.terms.append(term)
            self.store = replace(store, term=term, identity=identity, ends_at=self.lease_end())
            valid_until = self.timing.tenure_end(asked_at)
            answer = Grant(term=term, valid_until=valid_until, identity=identity, address="")
        if not self.lost():
            self.at(self.delay(), self.reply, process, life, asked_at,
                    lambda c, now, u: pure.answered(c, answer, now, u))  # fmt: skip

    def renew(self, process, life, asked_at, grant):
        if (self.store.term, self.store.identity) != (grant.term, grant.identity) or (
            not self.observed and self.now >= self.store.ends_at
        ):
            change = lambda c, now, u: pure.lost(c)  # noqa: E731
        else:
            self.store = replace(self.store, beat=self.store.beat + 1, ends_at=self.lease_end())
            newer = replace(grant, valid_until=self.timing.tenure_end(asked_at))
            change = lambda c, now, u: pure.renewed(c, newer, now)  # noqa: E731
        if not self.lost():
            self.at(self.delay(), self.reply, process, life, asked_at, change)

    def held(self, process):
        """Whether the lease is taken: by the store's clock, or by what this candidate has seen."""
        if not self.store.identity:
            return False
        if not self.observed:
            return self.now < self.store.ends_at
        beat = (self.store.term, self.store.beat)
        process.sighting = process.sighting.look(beat, process.now())
        return not process.sighting.is_over(self.timing, process.now())

    def lease_end(self):
        return self.now + self.timing.ttl_s / self.store_rate

    # Leaders write; the store applies what carries the newest term.

    def write_now_and_then(self, process, life):
        if process.leads():
            self.at(
                self.delay() * self.rng.choice([1, 1, 100]), self.apply, process.candidate.grant
            )
        self.at(0.3, self.write_now_and_then, process, life)

    def apply(self, grant):
        if grant.term == self.store.term and grant.identity == self.store.identity:
            assert grant.term >= self.store.wrote_term, "a deposed leader wrote"
            self.store.wrote_term = grant.term

    # The bad world.

    def lost(self):
        return self.faults and self.rng.random() < self.loss

    def delay(self):
        return min(0.35, self.rng.expovariate(1 / 0.01))

    def chaos(self):
        if not self.faults:
            return
        process = self.rng.choice(self.processes)
        if self.rng.random() < 0.5:
            process.resumes_at = self.now + self.rng.uniform(0, 4)
        else:
            process.begin()
            self.turn(process)
        self.at(self.rng.expovariate(1 / 2), self.chaos)
