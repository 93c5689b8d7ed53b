"""Mixture-of-experts layer: each token passes through a few of many feed-forward layers instead of one."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from axonn_jax.core.experts.capacity import by_capacity
from axonn_jax.core.experts.dispatch import EXPERT_AXIS, drops_duplicates, gather_tokens, scatter_tokens
from axonn_jax.core.experts.grouped import grouped_mlp
from axonn_jax.core.experts.router import Gate, Packing, Routing, balance_loss
from axonn_jax.core.experts.shape import ExpertShape, MoeConfig
from axonn_jax.core.options import Mlp, mlp_inputs
from axonn_jax.core.tensor.collectives import SEQUENCE_AXIS, axis_index, axis_size
from axonn_jax.core.tensor.elementwise import activated
from axonn_jax.core.tensor.params import normal_param
from axonn_jax.core.tensor.weight_gather import gather_weight

# Axes that split the experts' inner features: no communication is needed between an expert's matmuls.
_INNER = ("y", "x")


class ExpertKernel(nnx.Module):
    """Weights of one matmul for all experts, [experts, in, out]; `z` splits `in` further."""

    def __init__(self, shape: tuple[int, int, int], spec: P, *, std: float, key: jax.Array):
        self.kernel = normal_param(key, shape, std, spec)

    def gathered(self, dtype: DTypeLike) -> jax.Array:
        """Return the local experts' weights gathered over `z`; collectives: `gather_weight`."""
        return gather_weight(self.kernel.get_value(), jnp.dtype(dtype), dim=1)


class LocalExperts(nnx.Module):
    """Experts of a device: kernels `gate`, `up` and `down`, without biases."""

    def __init__(self, hidden: int, moe: ExpertShape, activation: Mlp, *, std: float, out_std: float, key: jax.Array):
        keys = jax.random.split(key, 3)
        wide, narrow = (moe.experts, hidden, moe.ffn), (moe.experts, moe.ffn, hidden)
        spec = P(EXPERT_AXIS, "z", _INNER)
        self.activation: Mlp = activation
        self.gate = None if mlp_inputs(activation) == 1 else ExpertKernel(wide, spec, std=std, key=keys[0])
        self.up = ExpertKernel(wide, spec, std=std, key=keys[1])
        self.down = ExpertKernel(narrow, P(EXPERT_AXIS, (*_INNER, "z"), None), std=out_std, key=keys[2])

    def __call__(self, x: jax.Array, choices: jax.Array, weights: jax.Array) -> jax.Array:
        """Return the local experts' partial sums for gathered tokens [tokens, hidden], weighted and summed by token."""
        up = self.up.gathered(x.dtype)
        gate = None if self.gate is None else self.gate.gathered(x.dtype)
        # Choices of other devices' experts become out of range, which `grouped_mlp` ignores.
        local = choices - axis_index(EXPERT_AXIS) * up.shape[0]
        return grouped_mlp(x, local, weights, gate, up, self.down.gathered(x.dtype), self.activation)

    def on_slots(self, slots: jax.Array) -> jax.Array:
        """Return each local expert's unweighted partial sums for its slots [experts/G, slots, hidden]."""
        up = slots @ self.up.gathered(slots.dtype)
        gate = None if self.gate is None else slots @ self.gate.gathered(slots.dtype)
        # Save only the activation's inputs: recomputing it is cheaper than storing its intermediates.
        inner = jax.checkpoint(partial(activated, self.activation))(gate, up)
        return inner @ self.down.gathered(slots.dtype)


class MixtureOfExperts(nnx.Module):
    """Router, routed experts and shared experts applied to the residual stream.

    Sources: DeepSpeed-TED (Singh et al., ICS 23); shared experts: DeepSeekMoE (arXiv 2401.06066).
    """

    def __init__(
        self,
        hidden: int,
        moe: ExpertShape,
        activation: Mlp,
        shared: Callable[..., nnx.Module] | None,
        *,
        std: float,
        out_std: float,
        training: MoeConfig,
        sequence_split: bool,
        key: jax.Array,
    ):
        router, experts, every = jax.random.split(key, 3)
        self.moe, self.training, self.sequence_split = moe, training, sequence_split
        # Set by Flax's `eval`. Evaluation drops no token, so that a result does not depend on the rest of the batch.
        self.deterministic = False
        self.router = Gate(hidden, moe, std=std, key=router)
        self.experts = LocalExperts(hidden, moe, activation, std=std, out_std=out_std, key=experts)
        self.shared = None if shared is None else shared(key=every)

    def __call__(self, x: jax.Array, packing: Packing | None = None) -> tuple[jax.Array, jax.Array]:
        """Return the branch to add to the residual stream [batch, seq, hidden/Gx], and the balance loss.

        Padding passes through no expert. Collectives: those of the router, the dispatch and the weight gathers.
        """
        batch, _, features = x.shape
        tokens = x.reshape(-1, features)
        text = None if packing is None else packing.local_text(sequence_split=self.sequence_split).reshape(-1)
        routing = self.router(tokens, text)
        y = self._dispatched(tokens, routing).reshape(x.shape)
        if self.shared is not None:
            shared = self.shared
            y = y + shared(x)
        return y, balance_loss(routing, self.moe, batch, packing, sequence_split=self.sequence_split)

    def _dispatched(self, tokens: jax.Array, routing: Routing) -> jax.Array:
        split, training, count = self.sequence_split, self.training, tokens.shape[0]
        # Generation may have any number of tokens; devices along `y` need equal slices of them.
        if drops_duplicates(split) and (padding := -count % axis_size(SEQUENCE_AXIS)):
            tokens = jnp.pad(tokens, ((0, padding), (0, 0)))
            routing = routing.padded(padding, self.moe.experts)
        if training.drops and not self.deterministic:
            compute, experts = self.experts.on_slots, self.moe.experts
            y = by_capacity(tokens, routing, compute, experts, training.slack, sequence_split=split)
        else:
            y = scatter_tokens(
                self.experts(*gather_tokens(tokens, routing, sequence_split=split)), sequence_split=split
            )
        return y[:count]
