"""Compare S3 clients on a link: `python -m tests.bench.ckpt.s3 --latency-s 0.02 --mb-per-s 90`.

Every client runs in a process of its own against a sink that keeps bytes in memory, in rounds, one
after the other, beside raw HTTP without S3.
"""

from __future__ import annotations

import http.client
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from ckpt.stores import Limits, open_store

ROOT = Path(__file__).parents[3]
PART = 8 << 20
KEYS = {"key": "k" * 8, "secret": "s" * 8}
Client = tuple[Callable[[memoryview], None], Callable[[memoryview], None]]


def raw(port: int) -> Client:
    """Plain HTTP, 16 connections: the limit of the link."""

    def each(call: Callable[[http.client.HTTPConnection, int], None], size: int) -> None:
        def one(start: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for at in range(start * PART, size, 16 * PART):
                call(connection, at)
            connection.close()

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(one, range(16)))

    def write(data: memoryview) -> None:
        def put(connection: http.client.HTTPConnection, at: int) -> None:
            connection.request("PUT", f"/bucket/raw/{at}", body=data[at : at + PART])
            connection.getresponse().read()

        each(put, len(data))

    def read(into: memoryview) -> None:
        def get(connection: http.client.HTTPConnection, at: int) -> None:
            connection.request("GET", f"/bucket/raw/{at}")
            answer, part = connection.getresponse(), into[at : at + PART]
            while len(part):
                part = part[answer.readinto(part) :]

        each(get, len(into))

    return write, read


def ours(port: int, **options: object) -> Client:
    limits = Limits(part_bytes=PART)
    url = f"http://127.0.0.1:{port}"
    named = options or {"endpoint_url": url, **KEYS}
    store = open_store("s3://bucket/ours", limits=limits, **named)
    store.probe()
    return (lambda data: store.put_large("x", data)), (lambda into: store.get_into("x", into))


def ours_by_s3fs(port: int) -> Client:
    endpoint = {"endpoint_url": f"http://127.0.0.1:{port}"}
    return ours(port, client="s3fs", client_kwargs=endpoint, **KEYS)


def checkpointer(port: int) -> Client:
    """A whole save (staged, hashed, committed) and a whole restore (checked), by Checkpointer."""
    import torch

    from ckpt import Checkpointer, Destination

    options = {"endpoint_url": f"http://127.0.0.1:{port}", **KEYS}
    where = Destination(url="s3://bucket/run", options=options)
    saving = Checkpointer(where, inline=True, keep_last=1)
    steps = itertools.count(1)

    def state(data: memoryview) -> dict[str, dict[str, torch.Tensor]]:
        tensors = torch.frombuffer(data, dtype=torch.uint8).split(len(data) // 50)
        return {"model": {f"t{i}": t for i, t in enumerate(tensors)}}

    def write(data: memoryview) -> None:
        saving.save(state(data), step=next(steps)).wait_durable()

    def read(into: memoryview) -> None:
        saving.close()  # what it holds in memory would be nearer
        with Checkpointer(where, inline=True) as checkpoints:
            assert checkpoints.restore(state(into)) == 2

    return write, read


def obstore(port: int) -> Client:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        access_key_id=KEYS["key"],
        secret_access_key=KEYS["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )

    def read(into: memoryview) -> None:
        starts = list(range(0, len(into), PART))
        ends = [min(s + PART, len(into)) for s in starts]
        with ThreadPoolExecutor(16) as pool:
            for start, part in zip(
                starts,
                pool.map(
                    lambda r: obstore.get_range(store, "obs", start=r[0], end=r[1]),
                    zip(starts, ends, strict=True),
                ),
                strict=True,
            ):
                view = memoryview(part)
                into[start : start + len(view)] = view

    def write(data: memoryview) -> None:
        obstore.put(store, "obs", data, chunk_size=PART, max_concurrency=16)

    return write, read


def boto3(port: int) -> Client:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEYS["key"],
        aws_secret_access_key=KEYS["secret"],
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            max_pool_connections=16,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    how = TransferConfig(multipart_chunksize=PART, max_concurrency=16, multipart_threshold=PART)

    def read(into: memoryview) -> None:
        file = io.BytesIO()
        client.download_fileobj("bucket", "boto", file, Config=how)
        into[:] = file.getbuffer()

    return (
        lambda data: client.upload_fileobj(io.BytesIO(data), "bucket", "boto", Config=how),
        read,
    )


def s3fs(port: int) -> Client:
    import s3fs

    fs = s3fs.S3FileSystem(**KEYS, client_kwargs={"endpoint_url": f"http://127.0.0.1:{port}"})

    def write(data: memoryview) -> None:
        with fs.open("bucket/s3fs", "wb", block_size=PART) as file:
            file.write(data)

    def read(into: memoryview) -> None:
        with fs.open("bucket/s3fs", "rb", block_size=PART) as file:
            file.readinto(into)

    return write, read


def dcp(port: int) -> Client:
    """FsspecWriter and FsspecReader over s3fs, one file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    endpoint = {"endpoint_url": f"http://127.0.0.1:{port}"}
    named = {**KEYS, "client_kwargs": endpoint}

    def state(data: memoryview) -> dict[str, torch.Tensor]:
        tensors = torch.frombuffer(data, dtype=torch.uint8).split(len(data) // 50)
        return {f"t{i}": t for i, t in enumerate(tensors)}

    def write(data: memoryview) -> None:
        writer = FsspecWriter("s3://bucket/dcp", sync_files=False, **named)
        dcp.save(state(data), storage_writer=writer, no_dist=True)

    def read(into: memoryview) -> None:
        reader = FsspecReader("s3://bucket/dcp", **named)
        dcp.load(state(into), storage_reader=reader, no_dist=True)

    return write, read


CLIENTS: dict[str, Callable[[int], Client]] = {
    "raw HTTP, 16 connections": raw,
    "ours": ours,
    "ours, save and restore": checkpointer,
    "ours through s3fs": ours_by_s3fs,
    "obstore, 16": obstore,
    "boto3, 16": boto3,
    "s3fs open": s3fs,
    "DCP FsspecWriter": dcp,
}


def measure(name: str, port: int, size: int) -> dict[str, float]:
    data = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))
    into = memoryview(bytearray(size))
    write, read = CLIENTS[name](port)
    found: dict[str, float] = {}
    write(data)  # connections are open then, and memory is there
    for what, call in (("write", lambda: write(data)), ("read", lambda: read(into))):
        cpu, start = time.process_time(), time.perf_counter()
        call()
        found[f"{what}_gb_s"] = size / (time.perf_counter() - start) / 1e9
        found[f"{what}_cpu_s_per_gb"] = (time.process_time() - cpu) / (size / 1e9)
    assert into == data, f"{name} read other bytes"
    return found


def one_round(name: str, latency_s: float, rate: float, size: int) -> dict[str, float] | str:
    """One client against a sink of its own; a word why when it does not work."""
    words = [sys.executable, "-m", "tests.bench.ckpt.s3_sink", str(latency_s), str(rate)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        try:
            port = sink.stdout.readline().strip()
            worker = [sys.executable, "-m", "tests.bench.ckpt.s3", "--worker", name]
            done = subprocess.run(
                [*worker, "--port", port, "--size-mb", str(size >> 20)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=180,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return "not done in 180 s"
        finally:
            sink.kill()
    if done.returncode:
        return done.stderr.strip().splitlines()[-1][:150]
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@click.command()
@click.option("--latency-s", default=0.0, show_default=True, help="Of each answer.")
@click.option("--mb-per-s", default=0.0, show_default=True, help="Per connection; 0 is no limit.")
@click.option("--size-mb", default=512, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--clients", default=",".join(["all"]), help="Names separated by semicolons.")
@click.option("--worker", hidden=True)
@click.option("--port", type=int, hidden=True)
def main(latency_s, mb_per_s, size_mb, rounds, clients, worker, port) -> None:
    """Print write and read rates and CPU seconds per GB of every client: medians of rounds."""
    if worker:
        print(json.dumps(measure(worker, port, size_mb << 20)))
        return
    names = list(CLIENTS) if clients == "all" else clients.split(";")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            found = one_round(name, latency_s, mb_per_s * 1e6, size_mb << 20)
            click.echo(f"{name}: {found}", err=True)
            if isinstance(found, dict):
                rows[name].append(found)
    click.echo(f"{size_mb} MiB, {latency_s * 1e3:g} ms, {mb_per_s:g} MB/s per connection\n")
    click.echo("| client | write GB/s | read GB/s | CPU s per GB, write / read |")
    click.echo("|---|---|---|---|")
    for name, seen in rows.items():
        if seen:
            write, read, cpu_w, cpu_r = (
                statistics.median(r[k] for r in seen)
                for k in ("write_gb_s", "read_gb_s", "write_cpu_s_per_gb", "read_cpu_s_per_gb")
            )
            click.echo(f"| {name} | {write:.2f} | {read:.2f} | {cpu_w:.2f} / {cpu_r:.2f} |")


if __name__ == "__main__":
    main()
