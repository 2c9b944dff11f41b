"""The command `ftcore config`: the time ladder as a manager here would have it."""

from __future__ import annotations

import json

import click

from ftcore.base.ladder import climb, ladder_text
from ftcore.settings import current_env, parse_limits


@click.command()
@click.option("--set", "settings", multiple=True, metavar="NAME=SECONDS", help="As if given.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config(settings: tuple[str, ...], as_json: bool) -> None:
    """Print every time limit with its source: default, derived, argument or environment."""
    ladder = climb(parse_limits(settings), current_env())
    click.echo(json.dumps(ladder.to_json()) if as_json else ladder_text(ladder))
