import os
import secrets

import pytest

from ckpt.stores import open_store
from tests.stores.servers import BUCKET, FAST, S3Server, moto, rclone


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory):
    with rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server():
    with moto() as server:
        yield server


@pytest.fixture(scope="session")
def own_server():
    """A store of your own: CKPT_TEST_S3=endpoint,key,secret (tests/stores/ceph.sh starts one)."""
    if "CKPT_TEST_S3" not in os.environ:
        pytest.skip("CKPT_TEST_S3 names no server")
    server = S3Server("own", *os.environ["CKPT_TEST_S3"].split(","))
    server.client().create_bucket(Bucket=BUCKET)
    return server


STORES = ["file", "memory", "fsspec-memory", "s3-rclone", "s3-moto", "s3-own"]
STORES += ["s3fs-moto", "s3fs-rclone"]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    """One store of each kind, empty."""
    kind, _, where = request.param.partition("-")
    if kind == "file":
        opened = open_store(str(tmp_path / "store"), limits=FAST)
    elif kind == "memory":
        opened = open_store(f"memory://{secrets.token_hex(6)}", limits=FAST)
    elif kind == "fsspec":
        opened = fsspec_memory()
    else:
        server = request.getfixturevalue(f"{where}_server")
        opened = server.store(client="s3fs" if kind == "s3fs" else "direct")
    with opened:
        yield opened


def fsspec_memory():
    from ckpt.stores.fsspec_store import FsspecStore

    return FsspecStore(f"memory://{secrets.token_hex(6)}", FAST)
