"""Local files are read where the page cache has them, and what cannot be read is an error."""

import os

import pytest

from ckpt.mapped import MappedFile
from ckpt.stores.errors import ObjectMissing, ObjectShort, StoreError

PAGE = 4096


@pytest.fixture
def path(tmp_path):
    (tmp_path / "file").write_bytes(os.urandom(8 * PAGE))
    return tmp_path / "file"


def test_what_is_brought_in_is_what_the_file_holds(path):
    mapped = MappedFile(path, 8 * PAGE)
    assert mapped.bring_in(PAGE, 3 * PAGE) == path.read_bytes()[PAGE : 3 * PAGE]
    mapped.close()


def test_a_shorter_file_is_refused_before_it_is_mapped(path):
    with pytest.raises(ObjectShort, match="ends at 32,768"):
        MappedFile(path, 9 * PAGE)


def test_a_file_that_is_cut_while_it_is_mapped_is_an_error_and_not_a_signal(path):
    mapped = MappedFile(path, 8 * PAGE)
    os.truncate(path, PAGE)
    with pytest.raises(StoreError, match="cannot read"):
        mapped.bring_in(4 * PAGE, 8 * PAGE)
    mapped.close()


def test_a_missing_file_is_a_missing_object(tmp_path):
    with pytest.raises(ObjectMissing):
        MappedFile(tmp_path / "none", PAGE)


def test_a_kernel_without_populate_reads_through_a_buffer(path, monkeypatch):
    monkeypatch.setattr("ckpt.mapped._MADV_POPULATE_READ", 9999)  # EINVAL, as before 5.14
    mapped = MappedFile(path, 8 * PAGE)
    assert mapped.bring_in(0, 8 * PAGE) == path.read_bytes()
    mapped.close()


def test_no_descriptor_stays_open(path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        MappedFile(path, 8 * PAGE).close()
    with pytest.raises(ObjectShort):
        MappedFile(path, 9 * PAGE)
    assert len(os.listdir("/proc/self/fd")) == before
