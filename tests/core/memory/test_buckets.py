"""Buckets hold every gradient once, in order, and no more than they may."""

from itertools import pairwise
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from axonn_jax.core.memory.buckets import Leaf, part_of, plan_buckets, reduce_in_buckets
from axonn_jax.core.tensor.specs import shard_mapped

leaves = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["a", "b"])).map(tuple), max_size=30).map(
    lambda pairs: [Leaf(f"p{i}", size, (group,)) for i, (size, group) in enumerate(pairs)]
)


@settings(deadline=None)
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


@settings(deadline=None)
@given(leaves, st.integers(1, 100))
def test_no_two_neighbouring_buckets_of_a_group_would_fit_into_one(found, capacity):
    by_name = {leaf.name: leaf for leaf in found}
    buckets = plan_buckets(found, capacity)
    for group in ("a", "b"):
        mine = [bucket for bucket in buckets if by_name[bucket[0]].group == (group,)]
        for bucket, following in pairwise(mine):
            used = sum(by_name[name].size for name in bucket)
            assert used + by_name[following[0]].size > capacity


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 200))
def test_parts_of_an_array_are_within_capacity_and_about_equal(shape, capacity):
    dim, rows = part_of(tuple(shape), capacity)
    below = prod(shape[dim + 1 :])
    assert 1 <= rows * below <= capacity
    count = -(-shape[dim] // rows)
    assert count * rows - shape[dim] < count  # by less than one row a part is the last one smaller
    assert dim == 0 or prod(shape[dim:]) > capacity  # one row is too large


def reduced(capacity, grads, *, by_parts=True):
    """[4, ...] arrays, one for each device of (data 2, z 2), summed over both axes or, unless `both`, over data."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "z"), axis_types=auto, devices=jax.devices()[:4])

    def axes_of(name):
        return ("data", "z") if "both" in name else ("data",)

    def local(grads):
        found = reduce_in_buckets({name: g[0] for name, g in grads.items()}, axes_of, capacity, by_parts=by_parts)
        return {name: g if "both" in name else g[None] for name, g in found.items()}

    outs = {name: P() if "both" in name else P("z") for name in grads}
    return jax.jit(shard_mapped(local, mesh, (P(("data", "z")),), outs))(grads)


@pytest.mark.parametrize(("capacity", "by_parts"), [(1, True), (7, True), (7, False), (40, True)])
def test_sums_are_the_same_bits_however_they_are_cut(capacity, by_parts):
    rng = np.random.default_rng(0)
    shapes = {"blocks.0.a": (5, 7), "blocks.1.a": (3, 2, 4), "both": (9,), "blocks.1.both": (2, 11), "scalar": ()}
    grads = {name: rng.normal(size=(4, *shape)).astype(np.float32) for name, shape in shapes.items()}
    want, found = reduced(10**6, grads), reduced(capacity, grads, by_parts=by_parts)
    for name, value in grads.items():
        np.testing.assert_array_equal(found[name], want[name], err_msg=name)
        by_axis = value.reshape(2, 2, *value.shape[1:])
        np.testing.assert_allclose(found[name], by_axis.sum((0, 1) if "both" in name else 0), rtol=1e-5, err_msg=name)
