"""The command `lighthouse`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from ftcore.base.cli import FtGroup
from ftcore.base.errors import BadSetting
from ftcore.base.log import configure_logging


@click.group(cls=FtGroup)
@click.version_option(package_name="ftcore")
def main() -> None:
    """The quorum server."""


@main.command()
@click.option("--bind", default="127.0.0.1:29510", show_default=True, help="HOST:PORT for groups.")
@click.option("--http", default="127.0.0.1:29511", show_default=True, help="HOST:PORT for people.")
@click.option("--min-replicas", default=1, show_default=True, help="Fewer never train.")
@click.option("--max-replicas", default=2**31, help="More groups than this wait as spares.")
@click.option("--join-timeout", default=10.0, show_default=True, help="Seconds for stragglers.")
@click.option("--heartbeat-timeout", default=2.0, show_default=True, help="Seconds of silence.")
@click.option("--promise-timeout", default=60.0, show_default=True, help="Seconds to end a step.")
@click.option("--journal", type=click.Path(path_type=Path), help="Keeps quorum ids over restarts.")
@click.option("--log-level", default="INFO", show_default=True)
@click.option("--log-json", is_flag=True, help="One JSON object a line.")
def serve(
    bind: str,
    http: str,
    min_replicas: int,
    max_replicas: int,
    join_timeout: float,
    heartbeat_timeout: float,
    promise_timeout: float,
    journal: Path | None,
    log_level: str,
    log_json: bool,
) -> None:
    """Serve replica groups until SIGTERM. Prints one JSON line with its addresses when ready."""
    from lighthouse.quorum import Policy
    from lighthouse.records import JournalRecords, MemoryRecords
    from lighthouse.serve import Serving, serve_until_told

    configure_logging(level=log_level, json_lines=log_json)
    if heartbeat_timeout <= 0 or join_timeout < 0 or min_replicas < 1:
        raise BadSetting(
            f"heartbeat-timeout {heartbeat_timeout} and min-replicas {min_replicas} must be above "
            f"zero, join-timeout {join_timeout} not below"
        )
    policy = Policy(
        replicas_min=min_replicas,
        replicas_max=max_replicas,
        join_timeout_s=join_timeout,
        heartbeat_timeout_s=heartbeat_timeout,
        reattach_timeout_s=min(0.5, heartbeat_timeout / 2),
        promise_timeout_s=promise_timeout,
    )
    records = JournalRecords(journal) if journal else MemoryRecords()

    def ready(place: Serving) -> None:
        click.echo(json.dumps({"address": place.address, "http": place.http_address}))

    asyncio.run(serve_until_told(policy, records, bind=bind, http_bind=http, ready=ready))


if __name__ == "__main__":
    main()
