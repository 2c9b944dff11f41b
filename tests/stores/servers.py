"""Start real S3 servers for tests and give each test a store of its own in them."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config

from ckpt.stores import Limits, open_store

BUCKET = "ckpt-tests"
FAST = Limits(stall_timeout_s=10, request_timeout_s=20, operation_timeout_s=60, part_bytes=1 << 20)


@dataclass(frozen=True)
class S3Server:
    name: str
    endpoint: str
    key: str = "ckpt-test-key"
    secret: str = "ckpt-test-secret"

    @property
    def port(self):
        return urlsplit(self.endpoint).port

    def through(self, port):
        """The same server seen through a proxy."""
        return replace(self, endpoint=f"http://127.0.0.1:{port}")

    def options(self, client="direct"):
        if client == "direct":
            return {"endpoint_url": self.endpoint, "key": self.key, "secret": self.secret}
        wire = {"connect_timeout": 5, "read_timeout": 10, "s3": {"addressing_style": "path"}}
        return {
            "client": "s3fs",
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"endpoint_url": self.endpoint, "region_name": "us-east-1"},
            "config_kwargs": wire,
        }

    def store(self, *, client="direct", limits=FAST, prefix=None, **options):
        url = f"s3://{BUCKET}/{prefix or secrets.token_hex(6)}"
        return open_store(url, limits=limits, **{**self.options(client), **options})

    def client(self):
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=Config(s3={"addressing_style": "path"}),
        )


def command(name):
    """The program beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


@contextmanager
def running(name, argv, port_pattern):
    """A server on a port of its own choice, which it prints; ends with the block."""
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        found = next(filter(None, (re.search(port_pattern, line) for line in server.stdout)))
        threading.Thread(target=server.stdout.read, daemon=True).start()  # never let it block
        seen = S3Server(name, f"http://127.0.0.1:{found.group(1)}")
        seen.client().create_bucket(Bucket=BUCKET)
        yield seen
    finally:
        server.kill()
        server.wait()


def rclone(directory):
    """A real server with files behind it: checks signatures, ignores conditions."""
    key = f"{S3Server.key},{S3Server.secret}"
    argv = [command("rclone"), "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", key]
    argv += ["--config", "", "--no-cleanup", "--vfs-cache-mode", "off", str(directory)]
    return running("rclone", argv, r"http://127\.0\.0\.1:(\d+)")


def moto():
    """An emulator that gets conditions right but checks no signatures."""
    argv = [command("moto_server"), "-H", "127.0.0.1", "-p", "0"]
    return running("moto", argv, r"http://127\.0\.0\.1:(\d+)")
