"""A mixture of experts as automatic partitioning is usually given one: one-hot masks and einsums (Switch, GShard).

What the package's own dispatch is measured against. Router and experts are those of the package's layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.experts.grouped import activated
from axonn_jax.experts.layer import MixtureOfExperts
from axonn_jax.experts.shape import slots_of
from axonn_jax.grid import BATCH_AXES

_BESIDE = ("data", "z")
"""Axes that split sequences beside the experts."""


class OneHotExperts(nnx.Module):
    """Takes the place of a `MixtureOfExperts` outside of any manual region; a sequence is a group of tokens."""

    def __init__(self, layer: MixtureOfExperts, mesh: Mesh):
        self.layer, self.mesh = layer, mesh

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[batch, seq, hidden] -> what experts add, zero for choices without a slot, and no balance loss.

        Sources: Switch Transformers (arXiv 2101.03961) section 2.2, GShard (arXiv 2006.16668) algorithm 1.
        """
        layer, moe, (batch, seq, hidden) = self.layer, self.layer.moe, x.shape
        routing = layer.router(x.reshape(-1, hidden))
        count = slots_of(seq, moe.per_token, moe.experts, layer.training.capacity)
        chosen = jax.nn.one_hot(routing.choices.reshape(batch, seq, -1), moe.experts, dtype=jnp.float32)
        ordered = chosen.transpose(0, 2, 1, 3).reshape(batch, -1, moe.experts)  # first choices first
        places = (jnp.cumsum(ordered, axis=1) - ordered).reshape(batch, -1, seq, moe.experts).transpose(0, 2, 1, 3)
        slots = jax.nn.one_hot(jnp.sum(places * chosen, -1).astype(jnp.int32), count, dtype=jnp.float32)
        combine = jnp.einsum(
            "bske,bskc,bsk->bsec", chosen, slots, routing.weights.reshape(batch, seq, -1), precision="highest"
        )
        combine = self._laid(combine, BATCH_AXES, None, None, None)
        dispatch = (combine > 0).astype(x.dtype)
        taken = self._laid(jnp.einsum("bsec,bsh->ebch", dispatch, x), "expert", _BESIDE, None, "x")
        experts = layer.experts
        up = self._wide(taken, experts.up.kernel.get_value())
        gate = None if experts.gate is None else self._wide(taken, experts.gate.kernel.get_value())
        out = jnp.einsum("ebcf,efh->ebch", activated(experts.activation, gate, up), experts.down.kernel.get_value())
        out = self._laid(out, "expert", _BESIDE, None, "x")
        added = jnp.einsum("bsec,ebch->bsh", combine.astype(x.dtype), out)
        return self._laid(added, BATCH_AXES, None, "x"), jnp.zeros((), jnp.float32)

    def _wide(self, taken: jax.Array, kernel: jax.Array) -> jax.Array:
        return self._laid(jnp.einsum("ebch,ehf->ebcf", taken, kernel), "expert", _BESIDE, None, "y")

    def _laid(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))
