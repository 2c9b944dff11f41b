"""The command `ftcore`."""

from __future__ import annotations

import click

from ftcore.base.cli import FtGroup
from ftcore.config_command import config
from ftcore.demo.command import demo


@click.group(cls=FtGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """Fault-tolerant training: demo and tools."""


main.add_command(config)
main.add_command(demo)

if __name__ == "__main__":
    main()
