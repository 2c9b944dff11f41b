from concurrent.futures import ThreadPoolExecutor

import pytest

from lighthouse.lease.chain import ENTRIES_KEPT, Chain, Entry


def grow(chain, count):
    for _ in range(count):
        base = chain.newest()
        assert chain.try_append(base, base) is not None
    return chain.newest()


def test_of_two_that_append_to_the_same_state_one_wins(tmp_path):
    chain = Chain(tmp_path)
    base = grow(chain, 1)
    assert chain.try_append(base, Entry(term=1)) is not None
    assert chain.try_append(base, Entry(term=2)) is None
    assert chain.newest().term == 1


def test_a_sleeper_cannot_change_the_past(tmp_path):
    """Its number was removed meanwhile, so the file system lets it be created again."""
    chain = Chain(tmp_path)
    asleep = grow(chain, 1)
    newest = grow(chain, 2 * ENTRIES_KEPT)
    assert not (tmp_path / f"entry-{asleep.number + 1:020}").exists()
    assert chain.try_append(asleep, Entry(term=9)) is None
    assert chain.newest() == newest


def test_an_append_followed_at_once_by_another_still_counts(tmp_path, monkeypatch):
    chain = Chain(tmp_path)
    base = grow(chain, 1)
    look = chain._numbers

    def somebody_is_fast():
        monkeypatch.setattr(chain, "_numbers", look)
        grow(Chain(tmp_path), 1)
        return look()

    monkeypatch.setattr(chain, "_numbers", somebody_is_fast)
    assert chain.try_append(base, Entry(term=5)).term == 5


def test_a_power_cut_after_renewals_leaves_the_last_synced_state(tmp_path):
    chain = Chain(tmp_path)
    written = chain.try_append(chain.newest(), Entry(term=7))
    for _ in range(3 * ENTRIES_KEPT):
        base = chain.newest()
        assert chain.try_append(base, base, synced=False)
    for path in tmp_path.iterdir():
        if path.name != f"entry-{written.number:020}":
            path.write_bytes(b"")
    found = chain.newest()
    assert found.term == 7
    assert chain.try_append(found, found) is not None


def test_few_files_are_kept(tmp_path):
    grow(Chain(tmp_path), 50)
    assert len(list(tmp_path.iterdir())) <= ENTRIES_KEPT + 2


def test_of_many_at_once_each_number_has_one_winner(tmp_path):
    def append(_):
        chain, wins = Chain(tmp_path), 0
        for _ in range(50):
            base = chain.newest()
            wins += chain.try_append(base, base) is not None
        return wins

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(append, range(8))) == Chain(tmp_path).newest().number


def test_a_foreign_file_is_named(tmp_path):
    (tmp_path / f"entry-{1:020}").write_text('{"colour": "blue"}')
    with pytest.raises(ValueError, match="is not ours"):
        Chain(tmp_path).newest()
