"""How long survivors stand still, and what a step costs: ours beside torchft and plain DDP.

`python -m tests.bench.recovery [--trials 5] [--peer/--no-peer] [TABLE...]` prints the tables kill,
stop, leave, spare, outage and step. Everything runs in turn on this machine, over loopback and
gloo, with the tiny model of trainer.py. A sample is lost when a survivor worked on it and it is in
no committed step.
"""

import os
import signal
import statistics
import time
from contextlib import contextmanager
from itertools import pairwise

import click

from tests.bench.recovery.systems import (
    SYSTEMS,
    WITH_SPARE,
    OurLighthouse,
    PeerLighthouse,
    Trainer,
    free_port,
)

STEADY = 100  # commits before anything is killed
PATIENCE_S = 60.0  # a survivor that has not committed by then is said to stand still
DOWN_S, WATCHED_S = 3.0, 75.0  # the lighthouse's outage, and how long its groups are watched


@contextmanager
def job(system, groups):
    """A lighthouse and its trainers, when each has made its first commits."""
    kind, start_lighthouse = SYSTEMS.get(system, WITH_SPARE)
    with start_lighthouse() as lighthouse:
        base = {**kind, "groups": groups, "steps": 10**6, "tell": True}
        base["address"] = lighthouse.address
        trainers = [Trainer({**base, "name": f"r{i}", "rank": i}) for i in range(groups)]
        try:
            for trainer in trainers:
                for _ in range(STEADY):
                    trainer.commit()
            time.sleep(0.5)
            yield lighthouse, trainers
        finally:
            for trainer in trainers:
                trainer.end()


def stall(system, groups, number, *, victim=-1):
    """Seconds from the signal to the last survivor's next commit, and samples the survivors lost.

    None instead of seconds when a survivor stood still to the end of our patience."""
    with job(system, groups) as (_, trainers):
        at = time.time()
        lost_one = trainers.pop(victim)
        try:
            lost_one.process.send_signal(number)
            found = [_first_after_pause(trainer, at, number) for trainer in trainers]
        finally:
            trainers.append(lost_one)
        lost = sum(trainer.lost for trainer in trainers[:-1])
        return (None if None in found else max(found) - at), lost


def _first_after_pause(trainer, at, number):
    """The first commit after the longest pause that begins within a second of the signal, as a
    commit that was under way is no answer."""
    commits = [at]
    while commits[-1] < at + 1.0:
        commit = trainer.commit(PATIENCE_S)
        if commit is None:
            return None
        if commit > at - 0.2:
            commits.append(commit)
    pauses = [(b - a, b) for a, b in pairwise(commits) if b > at]
    if number == signal.SIGTERM:  # it may leave a while later: the pause itself is what it costs
        return at + max(pauses)[0]
    return max(pauses)[1]


def outage(system, groups):
    """Longest pause of a group after its lighthouse is killed, and how many still train."""
    with job(system, groups) as (lighthouse, trainers):
        at = time.time()
        lighthouse.kill()
        time.sleep(DOWN_S)
        lighthouse.restart()
        time.sleep(WATCHED_S - (time.time() - at))
        pauses = [_longest_pause(trainer.commits_so_far(), at) for trainer in trainers]
        alive = sum(trainer.process.poll() is None for trainer in trainers)
        return max(pauses), alive


def _longest_pause(commits, at):
    """Up to the last commit; the wait for one that never comes is the rest of the watch."""
    marks = [at, *(c for c in commits if c > at), at + WATCHED_S]
    return max(b - a for a, b in pairwise(marks))


def step_time(kind, groups, steps):
    """p50 of a step in seconds without failures, over the last three quarters."""
    if kind["kind"] == "ddp":
        return run_to_end({**kind, "port": free_port()}, groups, steps)
    with (OurLighthouse if kind["kind"] == "ours" else PeerLighthouse)() as lighthouse:
        return run_to_end({**kind, "address": lighthouse.address}, groups, steps)


def run_to_end(config, groups, steps):
    config = {**config, "groups": groups, "steps": steps, "tell": False}
    trainers = [Trainer({**config, "rank": i, "name": f"r{i}"}) for i in range(groups)]
    try:
        return statistics.median(trainer.report()["0.5"] for trainer in trainers)
    finally:
        for trainer in trainers:
            trainer.end()


def print_stalls(systems, number, groups, trials):
    for system in systems:
        seen = [stall(system, groups, number) for _ in range(trials)]
        lost = max(samples for _, samples in seen)
        found = [seconds for seconds, _ in seen if seconds is not None]
        if len(found) == trials:
            times = f"{statistics.median(found):.3f} s | {max(found):.3f} s"
        else:
            times = f"none within {PATIENCE_S:.0f} s in {trials - len(found)} | "
        row = f"| {number.name} | {groups} | {system} | {times} | {lost} | {trials} |"
        print(row, flush=True)


def print_kills(systems, trials, steps):
    print("| signal | groups | system | median | slowest | samples lost, most | trials |")
    print("|---|---|---|---|---|---|---|")
    for groups in (2, 3):
        print_stalls(systems, signal.SIGKILL, groups, trials)


def print_stops(systems, trials, steps):
    print("| signal | groups | system | median | slowest | samples lost, most | trials |")
    print("|---|---|---|---|---|---|---|")
    for groups in (2, 3):
        for system in systems:
            few = trials if system.startswith("ftcore") else 1  # a peer's trial takes a minute
            print_stalls([system], signal.SIGSTOP, groups, few)


def print_leaves(systems, trials, steps):
    """An orderly leave: SIGTERM, which torchft's trainer does not know, so it dies of it."""
    print("| signal | groups | system | median | slowest | samples lost, most | trials |")
    print("|---|---|---|---|---|---|---|")
    for groups in (2, 3):
        print_stalls(systems, signal.SIGTERM, groups, trials)


def print_spares(systems, trials, steps):
    """Two groups compute and one follows; an active one is killed: until both others commit."""
    print("| active killed, spare takes over | median | slowest | trials |\n|---|---|---|---|")
    name = "ftcore, 2 active and a spare"
    found = [stall(name, 3, signal.SIGKILL, victim=0)[0] for _ in range(trials)]
    print(f"| ftcore | {statistics.median(found):.3f} s | {max(found):.3f} s | {trials} |")


def print_outages(systems, trials, steps):
    print(
        f"| lighthouse killed, back after {DOWN_S:.0f} s | longest pause in "
        f"{WATCHED_S:.0f} s | still training |"
    )
    print("|---|---|---|")
    for system in systems:
        pause, alive = outage(system, 2)
        print(f"| {system} | {pause:.3f} s | {alive} of 2 |", flush=True)


def print_step_times(systems, trials, steps):
    print("| step without failures, 2 groups | p50 |\n|---|---|")
    kinds = {
        "plain DDP over gloo": {"kind": "ddp"},
        "ftcore fast": {"kind": "ours", "mode": "fast"},
        "ftcore exact": {"kind": "ours", "mode": "exact"},
    }
    if any(system.startswith("torchft") for system in systems):
        kinds["torchft"] = {"kind": "torchft", "heartbeat_ms": 100}
    for name, kind in kinds.items():
        print(f"| {name} | {step_time(kind, 2, steps) * 1e3:.2f} ms |", flush=True)


TABLES = {
    "kill": print_kills,
    "stop": print_stops,
    "leave": print_leaves,
    "spare": print_spares,
    "outage": print_outages,
    "step": print_step_times,
}


@click.command()
@click.argument("tables", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--trials", default=5, show_default=True)
@click.option("--steps", default=2000, show_default=True, help="For the step times.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Run torchft beside us.")
def main(tables, trials, steps, peer):
    systems = [name for name in SYSTEMS if peer or name.startswith("ftcore")]
    print(f"load average at the start: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}")
    for table in tables or TABLES:
        print()
        TABLES[table](systems, trials, steps)


if __name__ == "__main__":
    main()
