"""Times of collectives on the links that serve them, worked out on paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.core.hardware import H100
from axonn_jax.core.tensor.overlap.op_cost import OpTimes
from axonn_jax.core.tensor.specs import shard_mapped

SIZES = {"data": 2, "z": 4, "y": 2, "x": 2}
MIB = 1 << 20
NODE, NETWORK = 3.6e11, 3.2e11


@pytest.fixture(scope="module")
def equations():
    """One collective of each kind: 1 MiB a device where it enters, by name and axes."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, 2, 2, 2), tuple(SIZES))
    seen = {}

    def f(v):
        def local(v):
            jax.lax.psum(v, "x"), jax.lax.psum(v, ("z", "y"))
            jax.lax.psum_scatter(v, "z", tiled=True), jax.lax.all_gather(v, "z", tiled=True)
            return v @ v

        for eqn in jax.make_jaxpr(local)(v).jaxpr.eqns:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            seen[eqn.primitive.name.removesuffix("_invariant"), axes] = eqn
        return v

    spec = P(("z", "y", "x"))
    jax.eval_shape(shard_mapped(f, mesh, spec, spec), jax.ShapeDtypeStruct((8 * 512, 512), jnp.float32))
    return seen


def find(equations, name, axis):
    return next(eqn for (kind, axes), eqn in equations.items() if kind == name and axes in (axis, (axis,)))


def test_groups_inside_a_node_have_its_links(equations):
    """Neighbours along `x` are of one node; a ring of two sends the whole buffer."""
    eqn = find(equations, "psum", "x")
    assert OpTimes(SIZES).link(eqn) == "node"
    assert OpTimes(SIZES).seconds(eqn) == pytest.approx(H100.latency_s + MIB / NODE)


def test_rings_across_nodes_share_what_a_node_sends(equations):
    """Groups of four along `z` are 16 devices long, two nodes; the four of a node each have a quarter of its links."""
    rates = OpTimes(SIZES)
    scatter, gather = find(equations, "reduce_scatter", "z"), find(equations, "all_gather", "z")
    assert rates.link(scatter) == rates.link(gather) == "network"
    assert rates.seconds(scatter) == pytest.approx(H100.latency_s + 0.75 * MIB / (NETWORK / 4))
    # Traced with two devices along z, so the gathered buffer has 2 MiB.
    assert rates.seconds(gather) == pytest.approx(H100.latency_s + 0.75 * 2 * MIB / (NETWORK / 4))
    assert OpTimes({**SIZES, "z": 2}).link(scatter) == "node"


def test_several_axes_are_one_group(equations):
    eqn = next(eqn for (_, axes), eqn in equations.items() if axes == ("z", "y"))
    assert OpTimes(SIZES).link(eqn) == "network"
    assert OpTimes(SIZES).seconds(eqn) == pytest.approx(H100.latency_s + 2 * 7 / 8 * MIB / (NETWORK / 2))
