"""Any layers in a row as a model that can be trained on a grid, a pipeline included."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError, typed_arguments
from axonn_jax.grid import BATCH_AXES, GridShape
from axonn_jax.models.segments import Segment
from axonn_jax.models.stacked import layer_form
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.params import SplitModule, key_of, renewed, split_module

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""Loss function: (output of the last layer, targets [batch, seq]) -> loss of every target, [batch, seq] float32."""


class SequenceModel(nnx.Module):
    """Model made of a sequence of Flax layers, each called on the output of the one before.

    The first layer is called on token ids [batch, seq], the last one's output goes to `loss` with the targets. Between
    layers passes an array whose first dim is the batch. Layers run on local shards, so plain Flax layers work on grids
    of `pipe`, `data` and `z`, with their parameters replicated; layers of `axonn_jax.tensor` are sharded over `x` and
    `y` as well. `between` is the layout of that array: by default the batch dim over `data` and `z`.

    A layer that holds random streams (`nnx.Rngs`) runs row by row and draws by the seed, the step and the row's place
    in the batch; an evaluation is Flax's `eval`. Layers may hold other state that no call changes: an `nnx.BatchNorm`
    that moves its statistics is a ``UserError``.
    """

    layer_list = "layers"

    @typed_arguments
    def __init__(
        self,
        layers: Sequence[nnx.Module],
        loss: Loss,
        *,
        flops: Sequence[int] | None = None,
        between: P | None = None,
    ):
        for index, layer in enumerate(layers):
            if not isinstance(layer, nnx.Module):
                accepted = "an nnx.Module; a function can be one of an nnx.Sequential's"
                raise UserError(f"layers[{index}]", getattr(layer, "__name__", layer), accepted)
        self.vocab, self.seq_len, self.drops_out, self.token_axes = None, None, True, BATCH_AXES
        self.packed = self.reads_words = self.balanced = False
        self.layer_period = 0
        self.layers = nnx.List(list(layers))
        self._loss = loss
        self._flops = None if flops is None else tuple(flops)
        self.residual_spec = P(BATCH_AXES) if between is None else between
        if self._flops is not None and len(self._flops) != len(self.layers):
            raise UserError(
                "flops", len(self._flops), f"numbers of FLOPs, one for each of the {len(self.layers)} layers"
            )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the model, one a layer; without `flops` a layer counts two FLOPs a parameter, as its matmuls
        take."""
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

    def counts(self, names: frozenset[str]) -> None:
        """Return None: no layer declares a parameter whose gradient is a count."""

    def check_grid(self, grid: GridShape) -> None:
        """Accept every grid: layers check their own parameters."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """Return the tokens, which the first layer takes; layers choose their own dtype."""
        return tokens

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """Return the arrived values."""
        return x

    def run_layer(self, layer: Any, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run a layer with a key as it trains, else as Flax's `eval` has it; row by row if it holds random streams."""
        split: Any = nnx.split(layer, nnx.RngState, ...)
        graphdef, streams, rest = split
        draws = bool(jax.tree.leaves(streams))

        def run(x: jax.Array, own: jax.Array) -> jax.Array:
            own_layer = nnx.merge(graphdef, seeded(streams, own), renewed(rest))
            _set_mode(own_layer, training=key is not None, draws=draws)
            y = own_layer(x)
            _check_unchanged(own_layer, rest)
            return y  # type: ignore[no-any-return]

        def run_row(row: jax.Array, own: jax.Array) -> jax.Array:
            y = run(row[None], own)
            if y.shape[:1] != (1,):
                shapes = f"{type(layer).__name__}, which draws and makes {y.shape} of {(1, *row.shape)}"
                raise UserError("model", shapes, "layers that draw and leave the first dim, a row of the batch each")
            return y[0]

        same = key_of(0)  # what draws in an evaluation too draws for every row alike, wherever the row is
        if not draws:
            return run(x, same)
        return jax.vmap(run_row, (0, None if key is None else 0))(x, same if key is None else key.of_rows(len(x)))

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run the layer of a number."""
        return self.run_layer(self.layers[number], x, None if key is None else key.of_layer(number))

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Sum of the losses of every target, times `weights` where given."""
        losses = self._loss(x, targets)
        return jnp.sum(losses if weights is None else losses * weights)


def seeded(streams: Any, key: jax.Array) -> Any:
    """A layer's random streams as they begin from a key, each with its own."""
    begun = []
    for number, (path, var) in enumerate(nnx.to_flat_state(streams)):
        shape, own = var.get_value().shape, jax.random.fold_in(key, number)
        counts = isinstance(var, nnx.RngCount)
        begun.append((path, var.replace(jnp.zeros(shape, jnp.uint32) if counts else jax.random.split(own, shape))))
    return nnx.from_flat_state(begun)


def _set_mode(layer: nnx.Module, *, training: bool, draws: bool) -> None:
    """Set the mode that a layer leaves open, as an `nnx.MultiHeadAttention` does; for an evaluation all, by `eval`.

    Raises ``UserError`` where it is to drop out and has nothing to draw from.
    """
    if not training:
        layer.eval()
    modules: list[Any] = [module for _, module in nnx.iter_modules(layer)]
    for module in modules:
        if getattr(module, "deterministic", False) is None:
            module.deterministic = False
        if isinstance(module, nnx.Dropout) and module.rate and not (module.deterministic or draws):
            given = f"nnx.Dropout({module.rate}) without rngs"
            raise UserError("model", given, "nnx.Dropout(rate, rngs=nnx.Rngs(seed))")


def _check_unchanged(layer: Any, before: Any) -> None:
    """Raise ``UserError`` if a call has changed state of a layer beside its random streams."""
    after = dict(nnx.to_flat_state(nnx.state(layer, nnx.Not(nnx.RngState))))
    for path, var in nnx.to_flat_state(before):
        pairs = zip(*(jax.tree.leaves(v.get_value()) for v in (var, after.get(path, var))), strict=True)
        if any(old is not new for old, new in pairs):
            state = f"{type(layer).__name__}, of which a call changes {'.'.join(map(str, path))} ({type(var).__name__})"
            accepted = "layers that change nothing but random streams: LayerNorm, BatchNorm(use_running_average=True)"
            raise UserError("model", state, accepted)
