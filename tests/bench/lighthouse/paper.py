"""What one change costs at N groups, without a network: `python -m tests.bench.lighthouse.paper`.

One member of a standing quorum dies. Counts the messages and bytes of the change (LostMember,
Prepare, promises, NewQuorum, reports that acknowledge it) and the CPU of core and codec.
"""

import sys
import time
from collections import Counter
from dataclasses import replace

from ftcore.wire.codec import decode_from_group, encode_hello, encode_order, encode_report
from ftcore.wire.messages import Hello, Member, NewQuorum, Prepare, Report, Want
from lighthouse.core import JobCore
from lighthouse.quorum import Policy


def group(index):
    host = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
    addresses = tuple(f"{host}:{port}" for port in range(29501, 29509))
    member = Member(
        replica_id=f"train_{index:05}",
        incarnation=1_700_000_000_000,
        store_address=f"{host}:29500",
        heal_addresses=addresses,
    )
    return Report(member=member, number=1, want=Want.SEAT)


class World:
    """All groups behind one core; carries messages as bytes and counts them."""

    def __init__(self, count):
        self.core = JobCore(
            "job", Policy(replicas_min=count // 2), first_id=1, now=0.0, must_learn=False
        )
        self.reports = {r.member.life: r for r in map(group, range(count))}
        self.counts, self.sizes, self.cpu_s = Counter(), Counter(), 0.0
        self.waiting = []
        self.core.defers = True
        for report in self.reports.values():
            self.send(encode_hello(Hello(job="job", report=report)), member=None)
        self.settle()

    def send(self, data, *, member):
        started = time.process_time()
        got = decode_from_group(data, member=member)
        is_hello = isinstance(got, Hello)
        turn = self.core.hello(got, 1.0) if is_hello else self.core.report(got, 1.0)
        self.take(turn, started)
        self.counts["up"] += 1
        self.sizes["up"] += len(data)

    def take(self, turn, started):
        encoded = {}
        for life, order in turn.orders:
            if id(order) not in encoded:
                encoded[id(order)] = encode_order(order)
            self.counts[type(order).__name__] += 1
            self.sizes[type(order).__name__] += len(encoded[id(order)])
            self.waiting.append((life, order))
        self.cpu_s += time.process_time() - started

    def settle(self):
        """Every group does what it was told and reports it, until nobody is told anything."""
        self.poll()
        while self.waiting:
            orders, self.waiting = self.waiting, []
            for life, order in orders:
                if life in self.reports:
                    self.obey(life, order)
            self.poll()

    def poll(self):
        started = time.process_time()
        self.take(self.core.poll(1.0), started)

    def obey(self, life, order):
        report = self.reports[life]
        number = report.number + 1
        match order:
            case Prepare(change_id=change_id):
                report = replace(report, number=number, promised=change_id)
            case NewQuorum(quorum=quorum):
                seated = Want.NOTHING if life in quorum.lives else report.want
                report = replace(
                    report, number=number, quorum_id=quorum.quorum_id, promised=0, want=seated
                )
            case _:
                return
        self.reports[life] = report
        self.send(encode_report(report), member=report.member)

    def one_dies(self):
        self.counts, self.sizes, self.cpu_s = Counter(), Counter(), 0.0
        life = next(iter(self.reports))
        report = replace(self.reports.pop(life), number=99, want=Want.GONE, reason="rank 0 died")
        self.send(encode_report(report), member=report.member)
        self.settle()
        assert len(self.core.standing.members) == len(self.reports)


def main():
    for count in map(int, sys.argv[1:] or ["64", "256", "1024", "4096", "10000"]):
        world = World(count)
        world.one_dies()
        down, size = sum(world.counts.values()) - world.counts["up"], sum(world.sizes.values())
        quorum_kb = world.sizes["NewQuorum"] / max(1, world.counts["NewQuorum"]) / 1000
        print(
            f"{count} groups: {world.counts['up']} messages up, {down} down, {size / 1e6:.1f} MB, "
            f"one quorum {quorum_kb:.1f} kB, {world.cpu_s * 1000:.0f} ms of CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
