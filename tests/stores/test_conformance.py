"""What every store must do, whatever is behind it."""

import threading

import pytest

from ckpt.stores import Outcome, Read
from ckpt.stores.errors import ObjectMissing, ObjectShort, StoreError

BIG = bytes(range(256)) * (3 << 14) + b"tail"  # twelve parts of 1 MiB and a bit


def test_what_is_put_is_got(store):
    store.put("step-1/a file+name.bin", b"hello")
    assert store.get("step-1/a file+name.bin") == b"hello"
    assert store.size("step-1/a file+name.bin") == 5


def test_a_put_replaces_the_whole_object(store):
    store.put("a", b"a long first version")
    store.put("a", b"short")
    assert store.get("a") == b"short"


def test_an_empty_object_is_an_object(store):
    store.put("empty", b"")
    assert store.size("empty") == 0
    assert store.get("empty") == b""


def test_a_missing_object_is_said_to_be_missing(store):
    assert store.stat("no/such") is None
    with pytest.raises(ObjectMissing, match="no/such"):
        store.get_into("no/such", memoryview(bytearray(4)))
    with pytest.raises(ObjectMissing, match="no/such"):
        store.size("no/such")


def test_a_range_fills_the_callers_memory(store):
    store.put("a", b"0123456789")
    memory = bytearray(b"........")
    store.get_into("a", memoryview(memory)[2:6], offset=3)
    assert memory == b"..3456.."


def test_many_small_ranges_of_many_objects_are_read_at_once(store):
    for name in "ab":
        store.put(name, BIG[:100_000])
    pieces = [(n, o, bytearray(7)) for n in "ab" for o in range(0, 99_000, 331)]
    store.get_many(Read(key=n, offset=o, into=memoryview(m)) for n, o, m in pieces)
    assert all(m == BIG[o : o + 7] for _, o, m in pieces)


def test_a_large_object_goes_and_comes_in_parts(store):
    store.put_large("big", BIG)
    memory = bytearray(len(BIG))
    store.get_into("big", memoryview(memory))
    assert memory == BIG
    assert store.size("big") == len(BIG)


def test_a_read_past_the_end_is_an_error_not_a_short_read(store):
    store.put("a", b"0123456789")
    with pytest.raises(ObjectShort):
        store.get_into("a", memoryview(bytearray(8)), offset=5)
    with pytest.raises(ObjectShort):
        store.get_into("a", memoryview(bytearray(8)), offset=50)


def test_parts_come_in_any_order_and_from_many_threads(store):
    with store.start_upload("big", len(BIG)) as upload:
        step = upload.part_bytes
        starts = list(range(0, len(BIG), step))
        parts = [(s // step, memoryview(BIG)[s : s + step]) for s in reversed(starts)]
        threads = [threading.Thread(target=upload.put_part, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        upload.finish()
    assert store.get("big") == BIG


def test_an_upload_that_is_not_finished_leaves_nothing(store):
    with store.start_upload("big", len(BIG)) as upload:
        upload.put_part(0, memoryview(BIG)[: upload.part_bytes])
    assert store.stat("big") is None
    assert list(store.list()) == []
    assert list(store.abort_orphans(older_than_s=0)) == []


def test_an_upload_with_a_hole_is_never_published(store):
    with store.start_upload("big", len(BIG)) as upload:
        upload.put_part(0, memoryview(BIG)[: upload.part_bytes])
        if upload.part_bytes < len(BIG):
            with pytest.raises(StoreError, match="never sent"):
                upload.finish()
    assert store.stat("big") is None


def test_a_part_of_the_wrong_size_is_refused(store):
    with (
        store.start_upload("big", len(BIG)) as upload,
        pytest.raises(StoreError, match="part 0 of big has 3 bytes"),
    ):
        upload.put_part(0, b"abc")


def test_of_eight_writers_exactly_one_creates_or_the_store_says_it_cannot_tell(store):
    outcomes = {}
    store.probe()

    def create(number):
        outcomes[number] = store.put_if_absent("lock", b"writer %d" % number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = int(store.get("lock")[-1:])
    assert outcomes[winner].is_ours
    if store.probe().conditional_put:
        assert outcomes[winner] is Outcome.CREATED
        assert [o.is_ours for o in outcomes.values()].count(True) == 1
    else:
        assert Outcome.CREATED not in outcomes.values()


def test_a_second_create_finds_the_first(store):
    assert store.put_if_absent("lock", b"mine").is_ours
    assert store.put_if_absent("lock", b"yours") is Outcome.EXISTS
    assert store.get("lock") == b"mine"


def test_a_repeated_create_finds_itself(store):
    first = store.put_if_absent("lock", b"mine")
    assert store.put_if_absent("lock", b"mine") is first


def test_the_probe_leaves_nothing_and_keeps_its_answer(store):
    assert store.probe() is store.probe()
    assert list(store.list()) == []


def test_a_listing_shows_whole_objects_of_the_prefix_in_order(store):
    for key in ("step-2/b", "step-2/a", "step-10/a", "other"):
        store.put(key, key.encode())
    assert [i.key for i in store.list("step-2/")] == ["step-2/a", "step-2/b"]
    assert [i.key for i in store.list("step-")] == ["step-10/a", "step-2/a", "step-2/b"]
    assert [(i.key, i.size_bytes) for i in store.list("o")] == [("other", 5)]
    assert [i.key for i in store.list()] == ["other", "step-10/a", "step-2/a", "step-2/b"]
    assert list(store.list("none/")) == []


def test_what_is_deleted_is_gone_and_may_be_deleted_again(store):
    store.put("a/x", b"1")
    store.put("a/y", b"2")
    store.delete(["a/x", "never/was"])
    store.delete(["a/x"])
    assert [i.key for i in store.list()] == ["a/y"]
