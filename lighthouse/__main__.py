"""The command `lighthouse`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftcore.base.cli import FtGroup
from ftcore.base.log import configure_logging
from lighthouse.commands import add_commands

if TYPE_CHECKING:
    from lighthouse.serve import Serving

FILE = click.Path(path_type=Path)
LEASES = "memory, file:DIR, etcd:HOST:PORT,…[/PREFIX] or kubernetes:NAMESPACE/NAME."


@click.group(cls=FtGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """The quorum server."""


@main.command()
@click.option("--bind", default="127.0.0.1:29510", show_default=True, help="HOST:PORT, for all.")
@click.option("--http", default="", help="A second HOST:PORT, with the same on it.")
@click.option("--advertise", default="", help="HOST:PORT that others reach us at, if not --bind.")
@click.option("--lease", default="memory", show_default=True, help=LEASES)
@click.option("--lease-ttl", type=float, help="Seconds a lease lasts.")
@click.option("--journal", type=FILE, help="With --lease memory: keeps quorum ids over restarts.")
@click.option("--tls-cert", type=FILE, help="PEM certificate chain; turns TLS on.")
@click.option("--tls-key", type=FILE, help="PEM key of --tls-cert.")
@click.option("--tls-client-ca", type=FILE, help="Only clients with a certificate of this CA.")
@click.option("--tokens", type=FILE, help="File of `JOB TOKEN` lines; read again when it changes.")
@click.option("--insecure", is_flag=True, help="Plain text on an address that is not loopback.")
@click.option("--min-replicas", default=1, show_default=True, help="Fewer never train.")
@click.option("--max-replicas", default=2**31, help="More groups than this do not compute.")
@click.option("--spares", default=0, help="So many of them follow each step, to take over at once.")
@click.option("--deaths-max", default=3, show_default=True, help="More hold a group back; 0: any.")
@click.option("--deaths-window", default=600.0, show_default=True, help="Seconds a death counts.")
@click.option("--hold-max", default=300.0, show_default=True, help="Seconds held back at most.")
@click.option("--detect-within", type=float, help="Seconds; all others follow: `ftcore config`.")
@click.option("--join-timeout", type=float, help="Seconds for stragglers.")
@click.option("--heartbeat-timeout", type=float, help="Seconds of silence.")
@click.option("--promise-timeout", type=float, help="Seconds to end a step.")
@click.option(
    "--torchft-join-timeout", default=60.0, show_default=True, help="For torchft clients."
)
@click.option("--torchft-heartbeat-timeout", default=5.0, show_default=True, help="The same.")
@click.option("--connections-max", default=20_000, show_default=True, help="More are refused.")
@click.option("--log-level", default="INFO", show_default=True)
@click.option("--log-json", is_flag=True, help="One JSON object a line.")
def serve(bind: str, http: str, log_level: str, log_json: bool, **options: object) -> None:
    """Serve replica groups until SIGTERM. Prints one JSON line with its addresses when ready."""
    from lighthouse.serve import serve_until_told
    from lighthouse.settings import Settings

    configure_logging(level=log_level, json_lines=log_json)
    settings = Settings.of(bind=bind, http=http, options=options, env=os.environ)

    def ready(place: Serving) -> None:
        click.echo(json.dumps({"address": place.address, "http": place.http_address}))

    asyncio.run(
        serve_until_told(
            settings.policy,
            settings.records(),
            lease=settings.lease(),
            place=settings.place,
            torchft=settings.torchft,
            ready=ready,
        )
    )


add_commands(main)

if __name__ == "__main__":
    main()
