"""Run one benchmark on several groups at once: a process for each, which meet at one store."""

import argparse
import multiprocessing

from ftcore.process_group.store import host_store


def parse_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.megabytes < 8:
        parser.error("--megabytes: at least 8, because a layer of the model has 4")
    return options


def run_members(member, options):
    """All that `member(rank, store_address, options, results)` puts into `results`."""
    context = multiprocessing.get_context("fork")
    results, host = context.SimpleQueue(), host_store()
    members = [
        context.Process(target=member, args=(rank, host.address, options, results))
        for rank in range(options.groups)
    ]
    for process in members:
        process.start()
    for process in members:
        process.join()
    if any(process.exitcode for process in members):
        raise SystemExit("a member failed, see above: there are no figures")
    found = []
    while not results.empty():
        found.append(results.get())
    return found
