"""Compare checkpointers on this machine: `python -m tests.bench.ckpt [COMMAND]`.

Without a command: all of them that need minutes only, one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tests.bench.ckpt import corruption, kills, own, ranks, s3
from tests.bench.ckpt.contestants import CONTESTANTS
from tests.bench.ckpt.runs import python_of, run
from tests.bench.ckpt.tables import conditions, markdown, ranks_table

CACHE = Path("~/.cache/ckpt-peers").expanduser()
HERE = Path(".bench-ckpt")  # on the disk of the working directory; removed at the end
TIMEOUT_S = 170


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Figures of ckpt and its peers, beside the limits of the same minutes."""
    if context.invoked_subcommand is None:
        for name in ("own", "peers", "ranks"):
            context.invoke(main.commands[name])


def shared_options(call: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--cache", type=Path, default=CACHE, help="Keeps the peers' environments."),
        click.option("--work", type=Path, default=HERE, help="A directory on the disk to measure."),
        click.option("--saves", default=3, show_default=True, help="Saves after the first."),
        click.option("--timeout-s", default=TIMEOUT_S, show_default=True, help="Of one peer."),
    ):
        call = option(call)
    return call


@main.command()
@shared_options
@click.option("--size", default="mid", show_default=True, help="big, mid or small.")
@click.option("--peers", default=",".join(CONTESTANTS), show_default=True)
@click.option("--loops/--no-loops", default=True, help="Measure lost training time as well.")
def peers(cache, work, saves, timeout_s, size, peers, loops) -> None:
    """One rank: call, staged, durable, load, memory, lost training time (T1 to T5, T8 to T11)."""
    rows, failures = [], []
    for name in peers.split(","):
        words = ["tests.bench.ckpt.worker", name, size, str((work / "run").absolute()), str(saves)]
        row = one([[*words, "loops" if loops else "plain"]], name, cache, work, timeout_s)
        rows.append(row) if isinstance(row, dict) else failures.append((name, size, row))
    click.echo(markdown(rows, failures))


@main.command("ranks")
@shared_options
@click.option("--size", default="small", show_default=True, help="big, mid or small.")
@click.option("--peers", default=",".join(ranks.PEERS), show_default=True)
def two_ranks(cache, work, saves, timeout_s, size, peers) -> None:
    """Two ranks, each with half of the state (T6, T7)."""
    rows, failures = [], []
    for name in peers.split(","):
        words = [name, ranks.SIZES_OF_TWO[size], str((work / "run").absolute()), str(saves)]
        commands = [["tests.bench.ckpt.ranks", *words]] * ranks.RANKS
        row = one(commands, name, cache, work, timeout_s)
        rows.append(row) if isinstance(row, dict) else failures.append((name, size, row))
    click.echo(ranks_table(rows, failures))


def one(commands, name: str, cache: Path, work: Path, timeout_s: float):
    python = python_of(name, cache)
    if python is None:
        return "could not be installed"
    row = run(commands, work / "run", timeout_s=timeout_s, python=python)
    with contextlib.suppress(OSError):  # what was there before stays
        work.rmdir()
    click.echo(f"{name}: {row}", err=True)
    return row


@main.command("own")
@shared_options
@click.option("--only", default=",".join(own.MEASURES), show_default=True)
def own_figures(cache, work, saves, timeout_s, only) -> None:
    """What no peer has: reshard, budgets, views, respawn, throttle (T9, T10, T17, T20)."""
    click.echo(f"{conditions()}\n\n| | target | measured |\n|---|---|---|")
    for name in only.split(","):
        words = ["tests.bench.ckpt.own", name, str((work / "run").absolute())]
        found = one([words], "ours", cache, work, timeout_s)
        rows = found["rows"] if isinstance(found, dict) else [[name, "", found]]
        for row in rows:
            click.echo("| " + " | ".join(row) + " |")


for name, command in (("s3", s3.main), ("corruption", corruption.main), ("kills", kills.main)):
    main.add_command(command, name)

if __name__ == "__main__":
    main()
