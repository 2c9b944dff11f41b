"""Measure heals beside torchft 0.2.0: the transports alone, and whole jobs in which a group joins.

    python -m tests.bench.heal [--gb 1 --gb 4] [--repeats 3] [--only transfer|job] [--no-peer]

Transfer: two processes on loopback. Job: a lighthouse, survivors that train, and a group that joins
them, each with its real manager. Heal is the time of the transfer itself, without the load into the
model for torchft and with it for ftcore. Lost is what the steps of the slowest survivor that
overlap the heal took longer than the median of those after it, in which the same processes share
the machine. Memory grown is the highest resident size during the join above that before it; the
joiner needs part of it for its own gradients and optimizer. "device" sleeps through its compute, as
a host does while its accelerator works; "cores" multiplies matrices on one core for each group.
"""

import importlib.util
import os

import click

from tests.bench.heal import job, transfer


@click.command()
@click.option("--gb", "sizes", type=float, multiple=True, help="1 and 4 if not given.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--only", type=click.Choice(["transfer", "job"]))
@click.option("--survivors", default=2, show_default=True, help="Of the job.")
@click.option("--trained", default=0.05, show_default=True, help="Part of the state Adam trains.")
@click.option("--compute", "computes", multiple=True, type=click.Choice(["device", "cores"]))
@click.option("--peer/--no-peer", default=True, show_default=True, help="Run torchft beside us.")
def main(sizes, repeats, only, survivors, trained, computes, peer):
    has_peer = peer and importlib.util.find_spec("torchft") is not None
    systems = ["ftcore", "torchft"] if has_peer else ["ftcore"]
    sizes = sizes or (1.0, 4.0)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, middle of {repeats} heals\n")
    if only != "job":
        show(transfer.table(sizes, systems=systems, repeats=repeats))
    if only != "transfer":
        shape = {"survivors": survivors, "trained": trained}
        shape["computes"] = computes or ("device", "cores")
        print(
            f"job of {survivors} survivors and one joiner, {trained:.0%} of the state is Adam's\n"
        )
        show(job.table(sizes, systems=systems, repeats=repeats, **shape))


def show(lines):
    for line in lines:
        print(line, flush=True)
    print()


if __name__ == "__main__":
    main()
