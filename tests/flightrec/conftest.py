"""The dump sets, unpacked once a session."""

import tarfile
from pathlib import Path

import pytest

SETS = Path(__file__).parent / "sets"


@pytest.fixture(scope="session")
def sets(tmp_path_factory):
    """Folder with one folder a set: `dumps`, `truth.json`, and logs where there are any."""
    root = tmp_path_factory.mktemp("sets")
    for name in ("nccl", "gloo"):
        with tarfile.open(SETS / f"{name}.tar.gz") as archive:
            archive.extractall(root / name, filter="data")
    return root
