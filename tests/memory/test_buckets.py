"""Buckets hold every gradient once, in order, and no more than they may."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from axonn_jax.memory.buckets import Leaf, plan_buckets

leaves = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["a", "b"])).map(tuple), max_size=30).map(
    lambda pairs: [Leaf(f"p{i}", size, (group,)) for i, (size, group) in enumerate(pairs)]
)


@given(leaves, st.integers(1, 100))
def test_every_leaf_once_and_within_capacity(found, capacity):
    by_name = {leaf.name: leaf for leaf in found}
    buckets = plan_buckets(found, capacity)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(by_name)
    for bucket in buckets:
        assert bucket
        assert len({by_name[name].group for name in bucket}) == 1
        assert len(bucket) == 1 or sum(by_name[name].size for name in bucket) <= capacity
        assert bucket == sorted(bucket, key=lambda name: int(name[1:]))


@given(leaves, st.integers(1, 100))
def test_no_two_neighbouring_buckets_of_a_group_would_fit_into_one(found, capacity):
    by_name = {leaf.name: leaf for leaf in found}
    buckets = plan_buckets(found, capacity)
    for group in ("a", "b"):
        mine = [bucket for bucket in buckets if by_name[bucket[0]].group == (group,)]
        for bucket, following in pairwise(mine):
            used = sum(by_name[name].size for name in bucket)
            assert used + by_name[following[0]].size > capacity
