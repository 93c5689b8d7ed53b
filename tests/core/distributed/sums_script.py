"""One of two processes: sums over `z` by the package's own collectives, their values and their compiled programs."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P

import axonn_jax as ax
from axonn_jax.core.tensor.collectives import all_gather, reduce_scatter

ROUNDS, LARGE = 20, 7_400_000


def main(address, rank):
    mesh = ax.init(z=2, coordinator=address, num_processes=2, process_id=int(rank)).mesh

    def whole(array):
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P("z")), lambda index: array[index])

    def local(array):
        return np.asarray(array.addressable_shards[0].data).astype(np.float64)

    def compiled(body, *arrays):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("z"), out_specs=P("z"))
        return jax.jit(mapped).lower(*arrays).compile()

    draw, found = np.random.default_rng(0), {"wrong": 0, "texts": []}
    for shape, dim, dtype in (((2, LARGE), 0, jnp.float32), ((3, 8, 5), 1, jnp.float32), ((4, 6), 0, jnp.bfloat16)):
        each = draw.normal(size=(2, *shape)).astype(np.float32)
        given = whole(each).astype(dtype)
        sums = compiled(lambda x, dim=dim: reduce_scatter(x[0], "z", dim)[None], given)
        found["texts"].append(sums.as_text())
        want = np.split(np.asarray(each.astype(dtype), np.float64).sum(0), 2, dim)[int(rank)]
        close = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
        for _ in range(ROUNDS if shape[-1] == LARGE else 1):
            found["wrong"] += int((np.abs(local(sums(given))[0] - want) > close * (1 + np.abs(want))).sum())

    weights = draw.normal(size=(2, 3)).astype(np.float32)  # the gradient of a gather is such a sum too
    slope = compiled(jax.grad(lambda x: (all_gather(x, "z", 0) ** 2).sum()), whole(weights))
    found["texts"].append(slope.as_text())
    found["wrong"] += int((np.abs(local(slope(whole(weights))) - 4 * weights[[int(rank)]]) > 1e-5).sum())
    scattered = sum(text.count("reduce-scatter") for text in found.pop("texts"))
    print(json.dumps({**found, "reduce-scatters": scattered}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
