"""A bad world in one thread and one seed: groups, a lighthouse, and everything that breaks them.

It drives the real `JobCore` and `MemberCore`. Time is a heap of events; whatever happens at random
comes from the seed. Safety is asserted at every event, liveness at the end, when faults stop.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace
from math import inf

from ftcore.control.member import Go, MemberCore
from ftcore.data.ledger import Ledger
from ftcore.deal import owners
from ftcore.wire.messages import (
    Hello,
    LostMember,
    Member,
    NewQuorum,
    Prepare,
    Quorum,
    Refused,
    Want,
    quorum_id_of,
    show_id,
)
from lighthouse.core import JobCore
from lighthouse.quorum import Policy

POLICY = {
    "join_timeout_s": 1.0,
    "heartbeat_timeout_s": 1.5,
    "reattach_timeout_s": 0.4,
    "promise_timeout_s": 4.0,
    "deaths_max": 0,
    "learn_timeout_s": 3.0,  # twice heartbeat_timeout_s, as `lighthouse serve --lease` sets it
}
FLAPS = {"deaths_max": 2, "deaths_window_s": 8.0, "hold_first_s": 0.5, "hold_most_s": 4.0}
REPORT_EVERY_S = 0.5
WITH_GUARDS = range(3000, 100_000)  # some seeds outside once failed without
WITH_SPARES = range(4000, 100_000)
VOTE_S = 0.002  # from the ranks to their manager, or back


@dataclass
class State:
    """What a group trains: how many steps, and a digest of what went into them."""

    committed: int = 0
    digest: int = 0
    lineage: int = 0
    ledger: Ledger = field(default_factory=lambda: Ledger(size=97, shards=3, per_shard=4))

    def copy(self) -> State:
        """What a heal moves: the position in the data travels as its state_dict."""
        ledger = Ledger(size=97, shards=3, per_shard=4)
        ledger.load_state_dict(self.ledger.state_dict())
        return State(self.committed, self.digest, self.lineage, ledger)


@dataclass
class Group:
    """One life of one replica group: its manager's core, and its ranks as one state."""

    core: MemberCore
    state: State = field(default_factory=State)
    is_up: bool = True
    paused_until: float = 0.0
    deaf_until: float = 0.0
    server: Server | None = None
    stream: int = 0
    snapshots: dict[int, State] = field(default_factory=dict)
    running: Go | None = None  # what the ranks run; the core may lag behind by one vote
    may_run: int = -1  # how far the ranks know they may go by themselves
    failures: int = 0
    has_said_no: bool = False
    votes: int = 0  # on the way to the manager
    aborted: set[int] = field(default_factory=set)
    token: int = 0  # grows when the ranks' step ends: late events of it are ignored
    torn: int = 0  # how often its state was: what it committed before is gone

    @property
    def life(self) -> tuple[str, int]:
        return self.core.member.life


@dataclass
class Server:
    """One lighthouse process."""

    core: JobCore
    term: int
    is_up: bool = True
    paused_until: float = 0.0
    attached: dict[tuple[str, int], int] = field(default_factory=dict)  # life -> stream
    greeted: set[tuple[tuple[str, int], int]] = field(default_factory=set)
    wake_at: float = inf


@dataclass
class Durable:
    """The journal or lease store: only the newest term may write."""

    is_real: bool = True
    term: int = 0
    quorum: Quorum | None = None

    def write(self, term: int, quorum: Quorum) -> bool:
        if term < self.term:
            return False
        assert not self.is_real or self.quorum is None or quorum.quorum_id > self.quorum.quorum_id
        self.quorum = quorum
        return True


class World:
    """Run it with `run(until)`; it raises AssertionError when a promise is broken."""

    linger_s = 0.0  # how long a dismissed group keeps its connections

    def __init__(
        self,
        seed: int,
        *,
        has_guards: bool = False,
        has_spares: bool = False,
        groups: int = 0,
        is_traced: bool = False,
    ) -> None:
        """`groups`: how many; 0 lets the seed decide."""
        self.is_traced = is_traced
        self.rng = random.Random(seed)
        self.guard_rng = random.Random(seed)  # apart, so that a seed without guards stays as it was
        self.has_guards = has_guards
        self.now = 0.0
        self._heap: list[tuple[float, int, object, tuple]] = []
        self._sequence = 0
        self.names = [f"r{i}" for i in range(groups or self.rng.randint(1, 5))]
        replicas_min = self.rng.randint(1, max(1, len(self.names) - 1))
        self.policy = Policy(replicas_min=replicas_min, **POLICY)
        if has_spares:
            active_max = random.Random(seed).randint(1, len(self.names))
            self.policy = replace(self.policy, replicas_max=active_max, spares_max=9, **FLAPS)
        self.loss = self.rng.choice([0.0, 0.0, 0.02, 0.1])
        self.lookahead = self.rng.choice([0, 1, 1])
        self.has_journal = self.rng.random() < 0.8
        self.durable = Durable(is_real=self.has_journal)
        self.groups: dict[str, Group] = {}
        self.servers: list[Server] = []
        self.faults = True
        self.is_up = True
        self.arrived: dict[tuple[int, int], dict[str, Group]] = {}
        self.commits: dict[int, list[tuple[Quorum, Group, int]]] = {}
        self.lost_lives: set[tuple[str, int]] = set()
        self.seen_quorums: dict[int, Quorum] = {}
        names = ("events", "commits", "quorums", "heals", "kills", "refusals")
        self.counts = dict.fromkeys(names, 0)
        self.settings_of: dict[str, dict[str, str]] = {}
        self.start_server()
        for name in self.names:
            self.at(self.rng.uniform(0, 0.5), self.start_group, name)
        self.at(1.0, self.chaos)

    # Time

    def at(self, delay: float, action, *args) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, action, args))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] < until:
            self.now, _, action, args = heapq.heappop(self._heap)
            self.counts["events"] += 1
            action(*args)
        self.now = until

    def trace(self, *words: object) -> None:
        if self.is_traced:
            print(f"{self.now:8.3f}", *words)

    def latency(self) -> float:
        return self.rng.expovariate(1 / 0.005)

    # Lighthouse

    @property
    def leader(self) -> Server:
        return self.servers[-1]

    def start_server(self) -> None:
        self.durable.term += 1
        recorded = self.durable.quorum if self.has_journal else None
        core = JobCore(
            "job",
            self.policy,
            first_id=quorum_id_of(self.durable.term, 1),
            now=self.now,
            recorded=recorded,
            must_learn=recorded is not None or not self.has_journal,
        )
        core.defers = True  # as the server does
        self.servers.append(Server(core=core, term=self.durable.term))

    def stop_server(self, server: Server) -> None:
        server.is_up = False
        for group in self.groups.values():
            if group.server is server:
                self.at(self.latency(), self.stream_broke, group, group.stream)

    def turn(self, server: Server, turn) -> None:
        for record in turn.records:
            if not self.durable.write(server.term, record.quorum):
                self.stop_server(server)
                return
            self.note_quorum(record.quorum)
        for fact in turn.facts:
            self.trace("lighthouse", server.term, fact.what, fact.about, fact.detail)
            if fact.what == "member.lost":
                self.note_lost(fact.quorum_id, fact.about)
        for life, order in turn.orders:
            stream = server.attached.get(life)
            if stream is not None:
                self.send(self.deliver_order, server, life, stream, order)
        if turn.wake_at < inf and turn.wake_at != server.wake_at:
            server.wake_at = turn.wake_at
            self.at(max(0.0, turn.wake_at - self.now), self.wake, server, turn.wake_at)

    def wake(self, server: Server, wake_at: float) -> None:
        if not server.is_up or server.wake_at != wake_at:
            return
        if self.now < server.paused_until:
            self.at(server.paused_until - self.now, self.wake, server, wake_at)
            return
        server.wake_at = inf
        self.turn(server, server.core.poll(self.now))

    def note_lost(self, quorum_id: int, replica_id: str) -> None:
        for member in self.seen_quorums[quorum_id].members:
            if member.replica_id == replica_id:
                self.lost_lives.add(member.life)

    def note_quorum(self, quorum: Quorum) -> None:
        self.counts["quorums"] += 1
        assert quorum.quorum_id not in self.seen_quorums, "one id, two quorums"
        assert quorum.quorum_id > max(self.seen_quorums, default=0), "quorum id went back"
        assert not quorum.members or len(quorum.members) >= self.policy.replicas_min
        assert not quorum.members or quorum.sources, "a quorum without any state"
        spares = max(0, len(quorum.members) - self.policy.replicas_max)
        assert len(quorum.spares) == spares, f"{quorum} should have {spares} spares"
        if quorum.members:
            self.check_deal(quorum)
        self.seen_quorums[quorum.quorum_id] = quorum

    def check_deal(self, quorum: Quorum) -> None:
        """Shards belong to active members that have the state; to spares only when none has."""
        for step in (quorum.from_step, quorum.from_step + 1):
            names = {quorum.replica_ids[rank] for rank in owners(quorum, step=step, shards=7)}
            healing = quorum.healing if step == quorum.from_step else frozenset()
            assert not names & healing, "a shard of one that heals"
            has_active = set(quorum.replica_ids) - quorum.spares - healing
            assert not (has_active and names & quorum.spares), "a spare computes without need"

    # The network

    def send(self, action, *args) -> None:
        """Lose, repeat, delay and reorder."""
        if self.faults and self.rng.random() < self.loss:
            return
        self.at(self.latency(), action, *args)
        if self.faults and self.rng.random() < self.loss:
            self.at(self.latency() * 20, action, *args)

    def connect(self, group: Group) -> None:
        if not group.is_up or group.server is not None:
            return
        server = self.rng.choice([s for s in self.servers[-2:] if s.is_up] or [self.leader])
        if not server.is_up or self.now < max(group.deaf_until, group.paused_until):
            self.at(self.rng.uniform(0.05, 0.2), self.connect, group)
            return
        group.server = server
        group.stream += 1
        server.attached[group.life] = group.stream
        report, standing = group.core.report(), group.core.standing
        hello = Hello(
            job="job",
            report=report,
            standing=standing,
            settings=self.settings_of.get(group.life[0], {}),
        )
        self.at(self.latency(), self.deliver_hello, server, group.life, group.stream, hello)

    def deliver_hello(self, server: Server, life, stream: int, hello: Hello) -> None:
        if self.hears(server, life, stream, self.deliver_hello, hello):
            server.greeted.add((life, stream))
            self.trace("lighthouse", server.term, "hello", hello)
            self.turn(server, server.core.hello(hello, self.now))

    def deliver_report(self, server: Server, life, stream: int, report) -> None:
        if (life, stream) not in server.greeted:
            return
        if self.hears(server, life, stream, self.deliver_report, report):
            self.trace("lighthouse", server.term, "hears", report)
            self.turn(server, server.core.report(report, self.now))

    def hears(self, server: Server, life, stream: int, action, *args) -> bool:
        """Whether a message of this stream arrives now; a paused lighthouse gets it later."""
        if not server.is_up or server.attached.get(life) != stream:
            return False
        if self.now < server.paused_until:
            delay = server.paused_until - self.now
            self.at(delay, action, server, life, stream, *args)
            return False
        return True

    def stream_broke(self, group: Group, stream: int) -> None:
        if group.stream == stream and group.server is not None:
            group.server = None
            self.at(self.rng.uniform(0.02, 0.2), self.connect, group)

    def server_saw_close(self, server: Server, life, stream: int) -> None:
        if self.hears(server, life, stream, self.server_saw_close):
            self.trace("lighthouse", server.term, "saw close", life)
            del server.attached[life]
            self.turn(server, server.core.closed(life, self.now))

    def break_stream(self, group: Group) -> None:
        server, stream = group.server, group.stream
        if server is not None:
            self.at(self.latency(), self.server_saw_close, server, group.life, stream)
            self.at(self.latency(), self.stream_broke, group, stream)

    # Groups

    def start_group(self, name: str) -> None:
        old = self.groups.get(name)
        if old is not None and old.is_up:
            return
        member = Member(replica_id=name, incarnation=self._sequence + 1)
        group = Group(core=MemberCore(member, lookahead=self.lookahead))
        self.groups[name] = group
        self.connect(group)
        self.at(0.0, self.beat, group)
        self.try_start(group)

    def beat(self, group: Group) -> None:
        if group.is_up:
            self.say(group, group.core.report())
            self.at(REPORT_EVERY_S, self.beat, group)

    def say_news(self, group: Group) -> None:
        """Report at once, if there is anything new but the count of steps."""
        if group.is_up:
            self.say(group, group.core.news())

    def say(self, group: Group, report) -> None:
        is_deaf = self.now < max(group.paused_until, group.deaf_until)
        if report is not None and group.server is not None and not is_deaf:
            self.send(self.deliver_report, group.server, group.life, group.stream, report)

    def deliver_order(self, server: Server, life, stream: int, order) -> None:
        group = self.groups.get(life[0])
        if group is None or group.life != life or not group.is_up:
            return
        if group.stream != stream or self.now < group.deaf_until:
            return
        if self.now < group.paused_until:
            self.at(group.paused_until - self.now, self.deliver_order, server, life, stream, order)
            return
        self.trace(life, "gets", order)
        match order:
            case Prepare():
                if group.core.prepare(order):
                    self.abort(group)
            case NewQuorum(quorum=quorum):
                group.core.new_quorum(quorum)
            case LostMember():
                if group.core.lost_member(order):
                    self.abort(group)
            case Refused(what=what):
                self.was_refused(group, what)
                return
        self.say_news(group)
        self.try_start(group)

    def was_refused(self, group: Group, what: str) -> None:
        raise AssertionError(f"{group.life} was refused: {what}")

    def abort(self, group: Group) -> None:
        """Tell the ranks that the group of the running quorum is of no use any more."""
        running = group.core.running
        if running is not None:
            group.aborted.add(running.quorum.quorum_id)
            if group.running is not None:
                self.at(0.001, self.end_step, group, group.token, "aborted")

    def try_start(self, group: Group) -> None:
        if not group.is_up or group.core.running is not None or group.running is not None:
            return
        if group.votes:
            return  # ranks say that they are ready only when all their votes are answered
        go = group.core.try_start()
        if go:
            self.trace(group.life, "starts", go.step, show_id(go.quorum.quorum_id), go.must_heal)
        if group.core.want is Want.GONE:
            self.say_news(group)
            self.at(self.linger_s, self.gone, group)
        elif go is None:
            self.say_news(group)
        elif go.must_heal:
            if group.state.committed == 0:
                self.tear(group)  # in place; a state of value is kept until the heal ends
            group.running, group.may_run = go, go.may_run
            self.at(0.01, self.heal, group, group.token, go)
        else:
            self.begin(group, go)

    def begin(self, group: Group, go: Go) -> None:
        """A step begins on a group that has the state for it."""
        assert group.state.committed == go.step
        group.running, group.may_run = go, max(group.may_run, go.may_run)
        if go.quorum.healing and go.step == go.quorum.from_step:
            group.snapshots = {go.quorum.quorum_id: group.state.copy()}
        self.at(self.rng.uniform(0.05, 0.4), self.reduce, group, group.token, go)

    def heal(self, group: Group, token: int, go: Go) -> None:
        if self.waits(group, token, self.heal, go):
            return
        sources = [self.groups[m.replica_id] for m in go.quorum.sources]
        sources = [g for g in sources if g.is_up and g.life in go.quorum.lives]
        ready = [g for g in sources if go.quorum.quorum_id in g.snapshots]
        if not sources:
            self.end_step(group, token, "no heal source is left")
        elif not ready:
            self.at(0.05, self.heal, group, token, go)
        else:
            snapshot = ready[0].snapshots[go.quorum.quorum_id]
            self.at(self.rng.uniform(0.05, 0.5), self.healed, group, token, go, ready[0], snapshot)

    def healed(self, group: Group, token: int, go: Go, source: Group, snapshot: State) -> None:
        if self.waits(group, token, self.healed, go, source, snapshot):
            return
        if not source.is_up:
            self.heal(group, token, go)
            return
        assert snapshot.committed == go.quorum.from_step, "a heal source is not at the plan's step"
        if group.core.is_valid and group.life not in self.lost_lives:
            assert group.state.committed <= snapshot.committed, "newer steps are healed over"
        self.counts["heals"] += 1
        group.state = snapshot.copy()
        group.torn += 1
        group.core.heal_ended(snapshot.lineage)
        self.begin(group, go)

    def waits(self, group: Group, token: int, action, *args) -> bool:
        """Whether this event has to be dropped, or put off because the group is paused."""
        if not group.is_up or group.token != token:
            return True
        if self.now < group.paused_until:
            self.at(group.paused_until - self.now, action, group, token, *args)
            return True
        return False

    def reduce(self, group: Group, token: int, go: Go) -> None:
        """All members meet here; the last one to arrive lets all go on."""
        if self.waits(group, token, self.reduce, go):
            return
        if go.quorum.quorum_id in group.aborted:
            self.end_step(group, token, "the group was aborted")
            return
        key = (go.quorum.quorum_id, go.step)
        arrived = self.arrived.setdefault(key, {})
        arrived[group.core.member.replica_id] = group
        members = [self.groups[m.replica_id] for m in go.quorum.members]
        if any(not g.is_up or g.life not in go.quorum.lives for g in members):
            self.end_step(group, token, "connection refused by peer")
        if len(arrived) < len(go.quorum.members):
            return
        digests = {(g.state.committed, g.state.digest) for g in arrived.values()}
        assert len(digests) == 1, f"step {go.step} reduces different states: {digests}"
        if self.has_guards and self.faults and self.guard_rng.random() < 0.05:
            self.refuse(arrived)
            return
        for member in arrived.values():
            self.at(self.latency(), self.reduced, member, member.token, go, list(arrived.values()))

    def refuse(self, arrived: dict[str, Group]) -> None:
        """A guard refuses the step on all members. It may name one, whose state is wrong then."""
        self.counts["refusals"] += 1
        odd = self.guard_rng.choice(["", *sorted(arrived)]) if len(arrived) > 2 else ""
        for name, member in arrived.items():
            delay = self.guard_rng.expovariate(1 / 0.005)
            self.at(delay, self.refused, member, member.token, name == odd)

    def refused(self, group: Group, token: int, is_odd: bool) -> None:
        if self.waits(group, token, self.refused, is_odd):
            return
        if is_odd:
            group.state.digest ^= 1  # wrong, and known to be: only a heal makes it right
            self.tear(group)
        self.end_step(group, token, "a guard refused the step")

    def reduced(self, group: Group, token: int, go: Go, peers: list[Group]) -> None:
        if self.waits(group, token, self.reduced, go, peers):
            return
        if any(not p.is_up for p in peers) and self.rng.random() < 0.5:
            self.end_step(group, token, "connection reset by peer")
            return
        self.commit(group, go)

    def commit(self, group: Group, go: Go) -> None:
        self.counts["commits"] += 1
        self.trace(group.life, "commits", go.step)
        self.check_commit(group, go)
        state = group.state
        state.digest = hash((state.digest, go.step, go.quorum.lives))
        state.committed += 1
        position = state.ledger.commit()
        assert position == 12 * state.committed, "samples were skipped or taken twice"
        state.lineage = go.quorum.quorum_id
        group.token += 1
        group.running = None
        self.commits.setdefault(go.step, []).append((go.quorum, group, group.torn))
        group.votes += 1
        self.at(VOTE_S, self.vote_arrives, group, "")
        if state.committed <= group.may_run:  # no need to wait for the answer
            self.begin(group, replace(go, step=state.committed, must_heal=False))

    def vote_arrives(self, group: Group, reason: str) -> None:
        """The manager hears how a step ended; what follows is known to the ranks a bit later."""
        if not group.is_up:
            return
        if self.now < group.paused_until:
            self.at(group.paused_until - self.now, self.vote_arrives, group, reason)
            return
        core = group.core
        group.votes -= 1
        group.has_said_no = group.has_said_no and not reason
        core.finish(is_committed=not reason, reason=reason)
        self.say_news(group)
        if group.has_said_no:
            return  # the ranks drop this answer: they wait for that to their no
        if core.running is not None:
            self.at(VOTE_S, self.answer_arrives, group, group.failures, core.running)
        else:
            self.at(VOTE_S, self.try_start, group)

    def answer_arrives(self, group: Group, failures: int, go: Go) -> None:
        """The ranks learn how far they may go; they may have been waiting for that."""
        if not group.is_up or group.failures != failures:
            return  # a step failed meanwhile: the ranks have read and dropped this answer
        group.may_run = max(group.may_run, go.may_run)
        if group.running is None and group.state.committed == go.step:
            self.begin(group, go)

    def tear(self, group: Group) -> None:
        group.core.state_torn()
        group.torn += 1

    def check_commit(self, group: Group, go: Go) -> None:
        if group.life in self.lost_lives:
            return  # its reduction had ended before it was given up; what it has now is healed over
        for quorum, other, torn in self.commits.get(go.step, ()):
            if quorum.quorum_id == go.quorum.quorum_id or not other.is_up:
                continue
            if other.torn != torn:
                continue  # a guard has found it wrong, or a heal has begun to write over it
            if other.life in self.lost_lives or other.core.want is Want.LEAVE:
                continue  # cut off and given up, or draining: nobody waits for its state
            assert quorum.lives & go.quorum.lives, (
                f"step {go.step} committed by two disjoint sets, {quorum} and {go.quorum}"
            )
            raise AssertionError(f"step {go.step} of {other.life} was taken back")

    def end_step(self, group: Group, token: int, reason: str) -> None:
        if self.waits(group, token, self.end_step, reason):
            return
        go = group.running
        if go is None:
            return
        self.trace(group.life, "fails", go.step, reason)
        group.token += 1
        group.running, group.may_run = None, -1
        group.failures += 1
        group.has_said_no = True
        self.arrived.setdefault((go.quorum.quorum_id, go.step), {}).pop(group.life[0], None)
        group.votes += 1
        self.at(VOTE_S, self.vote_arrives, group, reason)

    def gone(self, group: Group) -> None:
        """It was dismissed, and others have ended the last step that they needed it for."""
        self.die(group, says_so=True)

    def die(self, group: Group, *, says_so: bool) -> None:
        if not group.is_up:
            return
        self.trace(group.life, "dies", says_so)
        if says_so:
            group.core.die("rank 0 was killed by signal 9")
            self.say_news(group)
        group.is_up = False
        self.counts["kills"] += 1
        self.break_stream(group)
        for peer in self.groups.values():
            running = peer.running
            if peer.is_up and running and group.life in running.quorum.lives:
                delay = self.rng.uniform(0.01, 0.05)
                self.at(delay, self.peer_reset, peer, peer.token, group)

    def peer_reset(self, group: Group, token: int, dead: Group) -> None:
        """The transport noticed the death, if this group was in the reduction."""
        if self.waits(group, token, self.peer_reset, dead):
            return
        running = group.running
        if running is None:
            return
        key = (running.quorum.quorum_id, running.step)
        arrived = self.arrived.get(key, {})
        if group.core.member.replica_id in arrived and len(arrived) < len(running.quorum.members):
            self.end_step(group, token, "connection reset by peer")

    # What goes wrong

    def chaos(self) -> None:
        if not self.faults:
            return
        name = self.rng.choice(self.names)
        group = self.groups.get(name)
        faults = [self.kill, self.kill, self.blip, self.drain, self.restart_lighthouse]
        if self.has_journal:  # without one, a new lighthouse knows only those who come back in time
            faults += [self.pause, self.partition, self.depose]
        fault = self.rng.choice(faults)
        self.trace("chaos", fault.__name__, name)
        fault(name, group)
        self.at(self.rng.expovariate(1 / 1.5), self.chaos)

    def kill(self, name: str, group: Group | None) -> None:
        if group is not None and group.is_up:
            self.die(group, says_so=self.rng.random() < 0.6)
            self.at(self.rng.uniform(0.2, 4.0), self.start_group, name)

    def pause(self, name: str, group: Group | None) -> None:
        if group is not None:
            group.paused_until = self.now + self.rng.choice([0.3, 1.0, 3.0, 6.0])

    def blip(self, name: str, group: Group | None) -> None:
        if group is not None:
            self.break_stream(group)

    def partition(self, name: str, group: Group | None) -> None:
        if group is not None:
            group.deaf_until = self.now + self.rng.uniform(0.2, 4.0)
            self.break_stream(group)

    def drain(self, name: str, group: Group | None) -> None:
        if group is not None and group.is_up:
            group.core.leave("preempted")
            self.say_news(group)
            self.try_start(group)  # without a seat it goes at once
            self.at(self.rng.uniform(2.0, 5.0), self.drained, group)

    def drained(self, group: Group) -> None:
        """The notice is over: out in good order or not."""
        self.die(group, says_so=True)
        self.at(self.rng.uniform(0.2, 2.0), self.start_group, group.core.member.replica_id)

    def restart_lighthouse(self, name: str, group: Group | None) -> None:
        if self.leader.is_up:
            for server in self.servers:
                if server.is_up:
                    self.stop_server(server)
            self.at(self.rng.uniform(0.1, 4.0), self.start_server)

    def depose(self, name: str, group: Group | None) -> None:
        """A new leader while the old one is only paused, and does not know it."""
        if self.has_journal and self.leader.is_up:
            old = self.leader
            old.paused_until = self.now + self.rng.uniform(0.0, 2.0)
            self.start_server()
            self.at(self.rng.uniform(0.5, 3.0), self.stop_server, old)

    # The end: faults stop, and all must be well

    def calm(self) -> None:
        self.faults = False
        for name in self.names:
            group = self.groups.get(name)
            if group is None or not group.is_up:
                self.start_group(name)
            else:
                group.deaf_until = self.now  # a pause ends by itself
                if group.core.want is Want.LEAVE:
                    self.at(0.0, self.drained, group)
        if not self.leader.is_up and not self._server_is_coming():
            self.start_server()

    def _server_is_coming(self) -> bool:
        return any(action == self.start_server for _, _, action, _ in self._heap)

    def check_calm(self) -> None:
        standing = self.leader.core.standing
        assert standing is not None, "no quorum at all"
        assert standing.replica_ids == tuple(self.names), (
            f"only {standing.replica_ids} of {self.names} are in: {self.leader.core.view()}"
        )
        for group in self.groups.values():
            core = group.core
            assert core.quorum == standing, f"{group.life}: {core.quorum}, {core.report()}"
        states = {g.state.committed: g.state.digest for g in self.groups.values()}
        assert max(states) - min(states) <= 1, f"groups are apart: {states}"
        assert max(states) > standing.from_step + 3, "the last quorum hardly trains"


def run_seed(
    seed: int, *, bad_s: float = 12.0, calm_s: float = 20.0, is_traced: bool = False
) -> World:
    """One seed: `bad_s` seconds of faults, then `calm_s` in which everything must come right."""
    world = World(
        seed,
        has_guards=seed in WITH_GUARDS,
        has_spares=seed in WITH_SPARES,
        is_traced=is_traced,
    )
    world.run(bad_s)
    world.calm()
    world.run(bad_s + calm_s)
    world.check_calm()
    return world
