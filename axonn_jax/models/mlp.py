"""Feed-forward layer that all tokens pass."""

from functools import partial

import jax
from flax import nnx

from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.tensor.elementwise import activated
from axonn_jax.tensor.linear import Linear, column_parallel

# Inputs are kept for the backward pass and nothing in between: computing it again is cheaper than the memory it would
# pass through.
_activated = jax.checkpoint(activated, static_argnums=(0,))


class Mlp(nnx.Module):
    """Feed-forward layer: two matmuls around an activation function, or three with a gate."""

    def __init__(self, shape: ModelShape, comm: BlockComm, *, out_std: float, key: jax.Array):
        keys = jax.random.split(key, 3)
        linear = partial(Linear, bias=shape.bias == "all", comm=comm.of(comm.mlp))
        up = partial(linear, shape.hidden, shape.ffn, in_axis="x", std=shape.init_std)
        self.kind = shape.mlp
        self.gate = up(key=keys[0]) if shape.mlp_inputs == 2 else None
        self.up = up(key=keys[1])
        self.down = linear(shape.ffn, shape.hidden, in_axis="y", std=out_std, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, hidden/Gx] -> same; collectives are those of its `Linear` layers."""
        if self.gate is None:
            (h,) = column_parallel((self.up,), x)
            return self.down(_activated(self.kind, None, h))
        h, gate = column_parallel((self.up, self.gate), x)
        return self.down(_activated(self.kind, gate, h))
