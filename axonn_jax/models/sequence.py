"""Any layers in a row as a model that can be trained on a grid, a pipeline included."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.models.pieces import Piece, layer_scope
from axonn_jax.tensor.params import Parts, take_apart

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""(what the last layer gives, targets [batch, seq]) -> loss of every target, [batch, seq] float32."""


class SequenceModel(nnx.Module):
    """A model made of a sequence of Flax layers: each is called on what the one before gives.

    The first layer is called on token ids [batch, seq], the last one's output goes to `loss` with the targets. What
    passes between layers is an array whose first dim is the batch. Layers run on local shards, so plain Flax layers
    work on grids of `pipe`, `data` and `z`, with their parameters replicated; layers of `axonn_jax.tensor` are sharded
    over `x` and `y` as well. `between` is the layout of what passes: by default the batch dim over `data` and `z`.
    """

    def __init__(
        self,
        layers: Sequence[nnx.Module],
        loss: Loss,
        *,
        flops: Sequence[int] | None = None,
        between: P | None = None,
    ):
        self.layers = nnx.List(list(layers))
        self._loss = loss
        self._flops = None if flops is None else tuple(flops)
        self._between = P(BATCH_AXES) if between is None else between
        if self._flops is not None and len(self._flops) != len(self.layers):
            raise ValueError(f"flops has {len(self._flops)} entries for {len(self.layers)} layers")

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """One a layer; without `flops` a layer counts two FLOPs a parameter, which is what its matmuls would take."""
        pieces = []
        parts = take_apart(self)
        forms: list[Any] = []  # of the layers that differ
        for index, layer in enumerate(self.layers):
            params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
            flops = 2 * params if self._flops is None else self._flops[index]
            name, form = f"layers.{index}", self._form(index, parts)
            if form is not None and form not in forms:
                forms.append(form)
            alike = "" if form is None else str(forms.index(form))
            pieces.append(Piece(name, flops, params, name, alike))
        return tuple(pieces)

    def _form(self, index: int, parts: Parts) -> Any:
        """All of a layer but its values; None where it shares parameters with another, or has other state."""
        split: Any = nnx.split(self.layers[index], nnx.Param, ...)
        graphdef, state, rest = split
        names = ["layers." + ".".join(map(str, (index, *path))) for path, _ in nnx.to_flat_state(state)]
        if sum(layer is self.layers[index] for layer in self.layers) > 1 or jax.tree.leaves(rest):
            return None
        if not all(name in parts.params for name in names):
            return None
        prefix = f"layers.{index}."
        arrays = [(name.removeprefix(prefix), parts.params[name], parts.specs[name]) for name in names]
        return graphdef, [(name, array.shape, array.dtype, spec) for name, array, spec in arrays]

    @property
    def between(self) -> P:
        """Layout of what one layer hands to the next."""
        return self._between

    def stretch(
        self,
        first: int,
        last: int,
        x: jax.Array | None,
        tokens: jax.Array | None,
        *,
        dtype: jnp.dtype,
        key: jax.Array | None = None,
        later: jax.Array | int = 0,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Runs layers `first` to `last - 1`; `tokens` is [batch, seq + 1]. Layers choose their own dtype.

        The last gives the sum that `loss` does.
        """
        if first == 0:
            assert tokens is not None
            x = tokens[:, :-1]
        for index in range(first, min(last, len(self.layers))):
            with jax.named_scope(layer_scope(index)):
                x = self.layers[index](x)
        assert x is not None
        if last < len(self.layers):
            return x
        assert tokens is not None
        return _summed(self._loss(x, tokens[:, 1:]), weights)

    def loss(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        dtype: jnp.dtype,
        key: jax.Array | None = None,
        run_block: Callable[[Any, tuple[jax.Array, ...], jax.Array | None, int], tuple[jax.Array, ...]],
        streams: int = 1,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Sum of the losses of every target, times `weights` where given; what a grid without pipeline trains on."""
        xs = tuple(jnp.split(tokens, streams))
        for index, layer in enumerate(self.layers):
            xs = run_block(_Keyless(layer), xs, None, index)
        losses = [self._loss(x, t) for x, t in zip(xs, jnp.split(targets, streams), strict=True)]
        return _summed(jnp.concatenate(losses), weights)


def _summed(losses: jax.Array, weights: jax.Array | None) -> jax.Array:
    return jnp.sum(losses if weights is None else losses * weights)


class _Keyless(nnx.Module):
    """A layer as an activation policy runs it: with a dropout key, which it does not take."""

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(
        self, x: jax.Array, key: jax.Array | None, part: tuple[int, int] = (0, 1), again: bool = False
    ) -> jax.Array:
        layer: Any = self.layer
        return layer(x)  # type: ignore[no-any-return]
