"""The command `ftcore`."""

from __future__ import annotations

import click

from ftcore.base.cli import FtGroup


@click.group(cls=FtGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """Fault-tolerant training: demo and tools."""


if __name__ == "__main__":
    main()
