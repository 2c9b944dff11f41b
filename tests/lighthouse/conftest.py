import uuid

import pytest

from tests.lighthouse.lease.etcd_cluster import etcd_cluster
from tests.lighthouse.lighthouse_process import LighthouseProcess


@pytest.fixture
def lighthouses():
    """Starts real lighthouses; all are stopped at the end."""
    started = []

    def start(*options, **more):
        started.append(LighthouseProcess(*options, **more))
        return started[-1]

    yield start
    for lighthouse in started:
        lighthouse.stop()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["file", "etcd"])
def lease_text(request, tmp_path):
    if request.param == "file":
        return f"file:{tmp_path / 'lease'}"
    endpoints = request.getfixturevalue("etcd").endpoints
    return f"etcd:{','.join(endpoints)}/{uuid.uuid4()}"
