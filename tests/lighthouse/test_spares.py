"""Who computes and who follows: roles change only when an active group goes."""

import itertools

from ftcore.deal import contributors, owners
from ftcore.wire.messages import Member, Quorum
from lighthouse.spares import spares_of


def quorum(*names, **facts):
    members = tuple(Member(replica_id=name, incarnation=1) for name in names)
    sets = {name: frozenset(value) for name, value in facts.items()}
    return Quorum(quorum_id=5, from_step=7, members=members, **sets)


def test_within_the_limit_all_compute():
    assert spares_of(["a", "b"], active_max=2) == set()


def test_at_the_start_names_decide():
    assert spares_of(["c", "a", "b"], active_max=2) == {"c"}


def test_who_is_active_stays_active():
    standing = quorum("a", "b", "c", spares="a")
    assert spares_of("abc", active_max=2, standing=standing) == {"a"}


def test_a_spare_takes_the_place_of_the_lost():
    standing = quorum("a", "b", "c", spares="c")
    assert spares_of("bc", active_max=2, standing=standing) == set()


def test_who_comes_back_follows_the_one_that_took_over():
    standing = quorum("b", "c")
    assert spares_of("abc", active_max=2, standing=standing, healing="a") == {"a"}


def test_a_whole_spare_comes_before_an_active_one_that_must_heal():
    standing = quorum("a", "b", "c", spares="c")
    assert spares_of("abc", active_max=2, standing=standing, healing="a") == {"a"}


def test_every_small_case_has_as_many_active_as_may_be():
    for count, active_max, healing in itertools.product(range(6), range(1, 5), ("", "a", "bc")):
        names = "abcdef"[:count]
        standing = quorum(*"abc", spares="c")
        spares = spares_of(names, active_max=active_max, standing=standing, healing=healing)
        assert spares <= set(names) and len(names) - len(spares) == min(count, active_max)
        assert spares == spares_of(
            names[::-1], active_max=active_max, standing=standing, healing=healing
        )


def test_a_spare_owns_no_shard():
    assert contributors(quorum("a", "b", "c", spares="b"), step=9) == [0, 2]
    assert owners(quorum("a", "b", "c", spares="b"), step=9, shards=4) == (0, 0, 2, 2)


def test_a_spare_stands_in_while_all_active_ones_heal():
    healing = quorum("a", "b", spares="b", healing="a")
    assert contributors(healing, step=7) == [1]
    assert contributors(healing, step=8) == [0]
