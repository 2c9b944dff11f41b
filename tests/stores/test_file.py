"""What only a store of files must do: alignment, full and read-only disks, orphans, bad names."""

import os
import subprocess
import sys
import time

import pytest

from ckpt.stores import Outcome, open_store
from ckpt.stores.errors import StoreDenied, StoreError, StoreFull
from ckpt.stores.file import FileStore
from ckpt.stores.files import DirectFile

MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    with open_store(str(tmp_path / "run")) as store:
        yield store


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 5 * MIB + 3])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_memory_and_sizes_that_are_not_aligned_are_written_whole(store, size, shift):
    data = memoryview(os.urandom(size + shift))[shift:]
    store.put_large("a", data)
    assert store.get("a") == data
    assert store.path("a").stat().st_size == size


def test_writes_go_past_the_page_cache_where_the_file_system_allows(tmp_path):
    file = DirectFile(tmp_path / "a", 8192)
    is_direct = file.is_direct
    file.close()
    try:
        os.close(os.open(tmp_path / "b", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        assert not is_direct
    else:
        assert is_direct


@pytest.mark.parametrize("key", ["", "/etc/x", "../x", "a/../x", "a//b", "a/.", "a\0b"])
def test_a_key_never_leaves_the_directory(store, key):
    with pytest.raises(StoreError, match="cannot be a key"):
        store.put(key, b"1")


@pytest.fixture
def small_disk(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    where = tmp_path / "disk"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", where], check=True)
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk_is_named_with_path_and_bytes_and_nothing_is_left(small_disk):
    with open_store(str(small_disk)) as store:
        with pytest.raises(StoreFull, match=r"20,971,520 bytes of .*big.*ENOSPC") as failure:
            store.put_large("big", bytes(20 * MIB))
        assert failure.value.facts["errno"] == "ENOSPC"
        assert list(small_disk.iterdir()) == []
        store.put("small", b"1")


def test_a_read_only_disk_is_named(small_disk):
    with open_store(str(small_disk)) as store:
        store.put("a", b"1")
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(StoreDenied, match="EROFS"):
            store.put("b", b"1")
        assert store.get("a") == b"1"


WRITER = """
import sys
from ckpt.stores import open_store
store = open_store(sys.argv[1])
upload = store.start_upload("big", 64 << 20)
upload.put_part(0, bytes(upload.part_bytes))
print("half", flush=True)
sys.stdin.read()
"""


def test_the_unfinished_file_of_a_dead_writer_goes_and_that_of_a_living_one_stays(store):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, store.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"half\n"
    assert store.abort_orphans(older_than_s=0) == []
    writer.kill()
    writer.communicate()
    assert len(store.abort_orphans(older_than_s=3600)) == 1
    assert [p for p in store.root.rglob("*") if p.is_file()] == []


def test_an_unfinished_file_of_another_host_goes_when_it_is_old(store):
    store.put("a", b"1")
    foreign = store.root / ".b.123456@00000000.partial"
    foreign.write_bytes(b"half")
    assert store.abort_orphans(older_than_s=3600) == []
    os.utime(foreign, (time.time() - 7200,) * 2)
    assert store.abort_orphans(older_than_s=3600) == [foreign.name]
    assert not foreign.exists()


def test_without_hard_links_the_store_says_that_it_cannot_tell(store, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert not store.probe().conditional_put
    assert store.put_if_absent("a", b"1") is Outcome.UNGUARDED
    assert store.put_if_absent("a", b"2") is Outcome.EXISTS


def test_deleting_the_last_file_of_a_step_removes_its_directory(store):
    store.put("step-1/sub/a", b"1")
    store.put("step-2/a", b"1")
    store.delete(["step-1/sub/a"])
    assert [p.name for p in store.root.iterdir()] == ["step-2"]
    assert isinstance(store, FileStore)
