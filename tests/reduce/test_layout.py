from hypothesis import given
from hypothesis import strategies as st

from ftcore.reduce.layout import Slot, layout_hash, plan_buckets


def slot(name, numel=10, dtype="float32", device="cpu"):
    return Slot(name=name, shape=(numel,), dtype=dtype, device=device, numel=numel, bytes=4 * numel)


def test_the_last_parameter_comes_first():
    plans = plan_buckets([slot("a"), slot("b")])
    assert [[s.name for s in p.slots] for p in plans] == [["b", "a"]]


def test_the_first_bucket_is_small_so_that_reduction_starts_early():
    plans = plan_buckets([slot(str(i), 2**17) for i in range(9)])
    assert [len(p.slots) for p in plans] == [2, 7]


def test_the_hash_names_order_shape_and_dtype():
    a, b = slot("a"), slot("b")
    others = [[b, a], [a], [slot("a", 11), b], [a, slot("b", dtype="bfloat16")]]
    assert len({layout_hash(x) for x in ([a, b], *others)}) == 5


slots = st.lists(
    st.tuples(st.integers(0, 400), st.sampled_from(["float32", "bfloat16"])), max_size=30
)


@given(slots, st.integers(1, 2000))
def test_each_parameter_is_in_one_bucket_of_its_dtype_and_none_is_overfull(given_slots, limit):
    all_slots = [slot(str(i), n, dtype) for i, (n, dtype) in enumerate(given_slots)]
    plans = plan_buckets(all_slots, bucket_bytes_max=limit)
    assert sorted(s.name for p in plans for s in p.slots) == sorted(s.name for s in all_slots)
    for plan in plans:
        assert len({s.dtype for s in plan.slots}) == 1
        assert len(plan.slots) == 1 or sum(s.bytes for s in plan.slots) <= limit
