import itertools
import random

from ftcore.base.retry import backoff


def test_waits_grow_to_the_ceiling_and_never_reach_zero():
    waits = list(itertools.islice(backoff(random.Random(1), first_s=0.1, max_s=1.0), 50))
    assert all(0.05 <= w <= 1.0 for w in waits)
    assert all(w >= 0.5 for w in waits[5:])
