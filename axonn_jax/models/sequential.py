"""Any layers in a row as a model that can be trained on a grid, a pipeline included."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES, GridShape
from axonn_jax.models.segments import Segment
from axonn_jax.models.stacked import layer_form
from axonn_jax.tensor.dropout import DropoutKey
from axonn_jax.tensor.params import SplitModule, split_module

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""(what the last layer gives, targets [batch, seq]) -> loss of every target, [batch, seq] float32."""


class SequenceModel(nnx.Module):
    """A model made of a sequence of Flax layers: each is called on what the one before gives.

    The first layer is called on token ids [batch, seq], the last one's output goes to `loss` with the targets. What
    passes between layers is an array whose first dim is the batch. Layers run on local shards, so plain Flax layers
    work on grids of `pipe`, `data` and `z`, with their parameters replicated; layers of `axonn_jax.tensor` are sharded
    over `x` and `y` as well. `between` is the layout of what passes: by default the batch dim over `data` and `z`.
    """

    layer_list = "layers"

    def __init__(
        self,
        layers: Sequence[nnx.Module],
        loss: Loss,
        *,
        flops: Sequence[int] | None = None,
        between: P | None = None,
    ):
        self.vocab, self.seq_len, self.drops_out, self.token_axes = None, None, False, BATCH_AXES
        self.packed = self.reads_words = self.balanced = False
        self.balance_rate, self.layer_period = None, 0
        self.layers = nnx.List(list(layers))
        self._loss = loss
        self._flops = None if flops is None else tuple(flops)
        self.residual_spec = P(BATCH_AXES) if between is None else between
        if self._flops is not None and len(self._flops) != len(self.layers):
            raise ValueError(f"flops has {len(self._flops)} entries for {len(self.layers)} layers")

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One a layer; without `flops` a layer counts two FLOPs a parameter, which is what its matmuls would take."""
        segments = []
        parts = split_module(self)
        forms: list[Any] = []  # of the layers that differ
        for index, layer in enumerate(self.layers):
            params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
            flops = 2 * params if self._flops is None else self._flops[index]
            name, form = f"layers.{index}", self._form(index, parts)
            if form is not None and form not in forms:
                forms.append(form)
            alike = "" if form is None else str(forms.index(form))
            segments.append(Segment(name, flops, params, name, alike))
        return tuple(segments)

    def _form(self, index: int, parts: SplitModule) -> Any:
        """All of a layer but its values; None where it shares parameters with another, or has other state."""
        layer = self.layers[index]
        form = layer_form(layer, f"layers.{index}.", parts)
        shared = len(form.params) < len(nnx.to_flat_state(nnx.state(layer, nnx.Param)))
        again = sum(other_layer is layer for other_layer in self.layers) > 1
        return None if shared or again or form.state else form

    def check_grid(self, grid: GridShape) -> None:
        """Accepts every grid: layers check their own parameters."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """Returns the tokens, which the first layer takes; layers choose their own dtype."""
        return tokens

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """Returns what has arrived."""
        return x

    def run_layer(self, layer: Any, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Runs a layer, which takes no key."""
        return layer(x)  # type: ignore[no-any-return]

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Runs the layer of a number."""
        return self.run_layer(self.layers[number], x)

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Sum of the losses of every target, times `weights` where given."""
        losses = self._loss(x, targets)
        return jnp.sum(losses if weights is None else losses * weights)
