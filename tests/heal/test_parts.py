import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcore.heal.pace import Pace
from ftcore.heal.parts import PARTS_MAX, cut, part_bytes_for, window
from ftcore.heal.work import Work


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_parts_cover_every_byte_of_every_tensor_once_and_in_order(sizes, part_bytes):
    parts = cut(sizes, part_bytes)
    covered = [(s.tensor, i) for p in parts for s in p.segments for i in range(s.start, s.end)]
    assert covered == [(t, i) for t, size in enumerate(sizes) for i in range(size)]
    assert all(p.nbytes == part_bytes for p in parts[:-1])
    assert [p.offset for p in parts] == [i * part_bytes for i in range(len(parts))]


@pytest.mark.parametrize("total", [0, 1, 10**9, 10**12, 10**14])
def test_there_are_never_too_many_parts(total):
    assert total / part_bytes_for(total) <= PARTS_MAX


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(0, 90), st.integers(1, 20))
def test_a_window_shows_the_bytes_from_its_start(chunks, start, size):
    seen = b"".join(window([memoryview(c) for c in chunks], start, size))
    assert seen == b"".join(chunks)[start : start + size]


@pytest.mark.parametrize("seed", range(200))
def test_every_part_is_finished_once_whatever_breaks_and_is_slow(seed):
    """Random connections take, finish, give back and lack; the stupid twin is a set."""
    rng = random.Random(seed)
    work, missing = Work(rng.randint(0, 30)), set()
    missing |= set(range(work.count))
    held = {c: [] for c in range(6)}  # connection c belongs to source c % 3
    gone = {0: set(), 1: set(), 2: set()}
    for now in range(3000):
        connection = rng.choice(list(held))
        source, mine = connection % 3, held[connection]
        match rng.choice(["take", "finish", "finish", "break", "lack"]):
            case "take":
                part = work.take(connection, source, now)
                if part is not None:
                    assert part in missing and part not in gone[source]
                    assert not any(part in parts for parts in held.values())
                    mine.append(part)
            case "finish" if mine:
                part = mine.pop(0)
                work.finish(part, now)
                missing.remove(part)
            case "break" if rng.random() < 0.3:
                work.give_back(mine)
                mine.clear()
            case "lack" if mine and source != 2 and rng.random() < 0.2:
                part = mine.pop(0)
                gone[source].add(part)
                work.lack(part, source)
    assert not work.is_hopeless([0, 1, 2])
    assert work.is_finished == (not missing) and work.is_finished


def test_it_is_hopeless_when_all_living_sources_lack_a_part():
    work = Work(2)
    for source in (0, 1):
        assert work.take(source, source, 0.0) == 0
        work.lack(0, source)
    assert work.is_hopeless([0, 1])
    assert work.is_hopeless([])
    assert not work.is_hopeless([0, 1, 2])


def test_a_connection_is_late_only_at_the_end_and_by_what_others_take():
    work = Work(3)
    for connection in (0, 1, 2):
        work.take(connection, connection, 0.0)
    work.finish(0, 0.1)
    work.finish(1, 0.1)
    assert work.late(0.2) == set()
    assert work.late(0.6) == {2}


def test_a_pace_spreads_bytes_over_time():
    pace = Pace(100.0)
    assert [pace.delay(50, now=0.0), pace.delay(50, now=0.0), pace.delay(50, now=2.0)] == [
        0,
        0.5,
        0,
    ]
    assert Pace(None).delay(10**12, now=0.0) == 0
