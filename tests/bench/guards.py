"""Measure what guards cost a step: `python -m tests.bench.guards [--megabytes 100] [--groups 3]`.

The norm is computed in every step, a digest every so many, and words are exchanged when a digest or
a window is due or a value is suspicious.
"""

import statistics
import time

import torch

from ftcore.digest import state_digest
from ftcore.gradients import FastGradients
from ftcore.guard_watch import Watch
from ftcore.guards import NO_GUARDS, Guards, Word
from ftcore.process_group import GlooGroup
from tests.bench.members import parse_options, run_members
from tests.bench.reduce import big_model


def timed(action, rounds):
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:]), min(times[1:])


def objection(watch, gradients, names):
    """In a step without suspicion, and not the last one of a window."""
    return watch.objection(gradients, step=1, loss=0.5, replica_ids=names)


def member(rank, address, options, results):
    torch.set_num_threads(1)
    group = GlooGroup()
    group.configure(
        store_address=address, prefix="guards", rank=rank, world_size=options.groups, timeout_s=120
    )
    names = tuple(f"r{i}" for i in range(options.groups))
    watch = Watch(Guards(), group, device=torch.device("cpu"))
    exchange = timed(lambda: watch._ask(Word(), names), 40 * options.rounds)
    if rank == 0:
        results.put(("gather of all words", *exchange))
        model = big_model(options.megabytes)
        gradients = FastGradients(model, group, seed=0)
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        for name, guards in (("no guards", NO_GUARDS), ("Guards(), in every step", Guards())):
            watch = Watch(guards, group, device=torch.device("cpu"))
            calm = timed(lambda w=watch: objection(w, gradients, names), options.rounds)
            results.put((name, *calm))
        digest = timed(lambda: state_digest(gradients.compared()), options.rounds)
        results.put(("digest of the parameters", *digest))
    group.barrier().wait()
    group.close()


def main():
    options = parse_options()
    results = run_members(member, options)
    size = f"{options.megabytes} MB of parameters, {options.groups} groups, gloo, one thread each"
    print(f"{size}; milliseconds")
    print(f"{'':28} {'median':>9} {'best':>9}")
    for name, median, best in results:
        print(f"{name:28} {median:9.3f} {best:9.3f}")


if __name__ == "__main__":
    main()
