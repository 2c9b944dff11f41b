"""The command `ckpt`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from ftcore.base.cli import FtGroup

if TYPE_CHECKING:
    from ckpt.stores import Store


@click.group(cls=FtGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """Checkpoints: list, verify, compare, copy."""


def _store(url: str) -> Store:
    from ckpt.stores import open_store

    return open_store(url)


def verified_exit(is_good: bool) -> None:
    """Exit code 1 tells scripts that something was found."""
    if not is_good:
        sys.exit(1)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
step_option = click.option("--step", type=int, help="The step; the newest if left out.")


@main.command()
@click.argument("url")
@json_option
def ls(url: str, as_json: bool) -> None:
    """List the complete steps at URL."""
    from ckpt import commands

    commands.ls(_store(url), as_json=as_json)


@main.command()
@click.argument("url")
@step_option
@json_option
def show(url: str, step: int | None, as_json: bool) -> None:
    """Show the tensors and values of a step."""
    from ckpt import commands

    commands.show(_store(url), step, as_json=as_json)


@main.command()
@click.argument("url")
@step_option
@click.option("--deep", is_flag=True, help="Read every byte and compare checksums.")
@click.option("--all", "all_steps", is_flag=True, help="Every step instead of one.")
@json_option
def verify(url: str, step: int | None, deep: bool, all_steps: bool, as_json: bool) -> None:
    """Check that a step is whole. Exit code 1 when it is not."""
    from ckpt import commands

    good = commands.verify(_store(url), step, deep=deep, all_steps=all_steps, as_json=as_json)
    verified_exit(good)


@main.command()
@click.argument("a")
@click.argument("b")
@click.option("--step-a", type=int, help="The step at A; the newest if left out.")
@click.option("--step-b", type=int, help="The step at B; the newest if left out.")
@json_option
def diff(a: str, b: str, step_a: int | None, step_b: int | None, as_json: bool) -> None:
    """Name the tensors in which the steps at A and B differ, and by how much."""
    from ckpt import commands

    verified_exit(commands.diff(_store(a), step_a, _store(b), step_b, as_json=as_json))


@main.command()
@click.argument("source")
@click.argument("target")
@step_option
@json_option
def copy(source: str, target: str, step: int | None, as_json: bool) -> None:
    """Copy a step to another place, checked on the way; it appears there whole or not at all."""
    from ckpt import commands

    commands.copy(_store(source), _store(target), step, as_json=as_json)


@main.command()
@click.argument("url")
@click.option("--keep-last", type=int, help="Keep so many of the newest steps.")
@click.option("--keep-every", type=int, help="Keep steps that are multiples of this.")
@click.option("--keep-best", type=int, help="Keep so many of the best steps by the metric.")
@click.option("--metric", default="loss", show_default=True, help="What best means.")
@click.option(
    "--best-is", type=click.Choice(["lowest", "highest"]), default="lowest", show_default=True
)
@click.option("--keep-younger-s", type=float, help="Keep steps younger than this.")
@click.option(
    "--leftovers-older-s",
    type=float,
    default=3600.0,
    show_default=True,
    help="Younger leftovers may belong to a save that is under way.",
)
@click.option("--yes", is_flag=True, help="Do it; without this the plan is only shown.")
@json_option
def prune(url: str, leftovers_older_s: float, yes: bool, as_json: bool, **rules: object) -> None:
    """Delete steps that no rule keeps, and leftovers of saves that were never committed.

    The newest complete step is always kept. Without rules only leftovers go.
    """
    from ckpt import commands
    from ckpt.retention import Policy

    policy = Policy.from_json(rules)
    commands.prune(
        _store(url), policy, leftovers_older_s=leftovers_older_s, yes=yes, as_json=as_json
    )


@main.command()
@click.argument("url")
@click.argument("step", type=int)
@click.option("--remove", is_flag=True, help="Let retention delete it again.")
def pin(url: str, step: int, remove: bool) -> None:
    """Keep a step whatever retention says."""
    from ckpt import commands

    commands.pin(_store(url), step, remove=remove)


@main.command()
@click.argument("url")
@click.option("--size-mb", default=256, show_default=True, help="Size of the object in MiB.")
@json_option
def bench(url: str, size_mb: int, as_json: bool) -> None:
    """Measure the store at URL: conditions, latency, rates with 1, 4 and 16 connections."""
    from ckpt import commands

    commands.bench(url, size_mb, as_json=as_json)


@main.command()
@click.argument("url")
@click.argument("to", type=click.Path())
@click.option(
    "--form", type=click.Choice(["dcp", "safetensors", "torch"]), default="dcp", show_default=True
)
@step_option
@click.option("--only", default="", help="Only names with this prefix, such as `model.`.")
@json_option
def export(url: str, to: str, form: str, step: int | None, only: str, as_json: bool) -> None:
    """Write a step at URL to the new directory TO in another format."""
    from ckpt import commands

    commands.export(_store(url), to, form, step, only, as_json=as_json)


@main.command()
@click.option(
    "--linger-s",
    type=float,
    default=600.0,
    show_default=True,
    help="Stay so long without trainers.",
)
@click.option(
    "--niceness", type=int, default=15, show_default=True, help="How far to yield to the trainer."
)
@click.option("--metrics-address", default="", help="HOST:PORT for Prometheus; port 0 picks one.")
@click.option("--stop", is_flag=True, help="Stop the daemon of this host once it is idle.")
def daemon(linger_s: float, niceness: int, metrics_address: str, stop: bool) -> None:
    """Run the upload daemon of this host in the foreground. Trainers start it by themselves."""
    if stop:
        _stop_daemon()
        return
    command = [sys.executable, "-m", "ckpt.daemon", "--linger-s", str(linger_s)]
    command += ["--niceness", str(niceness), "--metrics-address", metrics_address]
    os.execv(sys.executable, command)


def _stop_daemon() -> None:
    from ckpt.daemon.server import running_pid

    pid = running_pid()
    if pid is None:
        click.echo("no daemon runs here")
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60.0
    while running_pid() == pid and time.monotonic() < deadline:
        time.sleep(0.05)
    click.echo(f"stopped the daemon with pid {pid}" if running_pid() != pid else "still busy")


if __name__ == "__main__":
    main()
