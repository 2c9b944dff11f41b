"""The frame of all four command lines: an FtError becomes two lines and exit code 1."""

from __future__ import annotations

import json
from collections.abc import Mapping

import click

from ftcore.base.errors import FtError


class FtGroup(click.Group):
    """A command group that prints what happened and the remedy, never a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except FtError as error:
            raise click.ClickException(f"{error}\n{error.remedy}") from error


def print_json(value: Mapping[str, object]) -> None:
    """Print one JSON object with sorted keys on stdout."""
    click.echo(json.dumps(value, sort_keys=True))
