"""Sequential model of arbitrary Flax layers that trains on any grid, including pipelines."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.grid import BATCH_AXES, GridShape
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.models.stacked import layer_form
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.params import SplitModule, key_of, renewed, split_module

Loss = Callable[[jax.Array, jax.Array], jax.Array]
"""Loss function: (output of the last layer, targets [batch, seq]) -> loss of every target, [batch, seq] float32."""


class SequenceModel(nnx.Module):
    """Model made of a sequence of Flax layers, each called on the output of the previous one.

    The first layer takes token ids [batch, seq]; the last layer's output goes to `loss` with the targets. Arrays
    between layers have the batch as their first dim. Layers run on local shards, so plain Flax layers work on grids of
    `pipe`, `data` and `z` with replicated parameters; those of `axonn_jax.core.tensor` are sharded over `x` and `y` as
    well.

    A layer with random streams (`nnx.Rngs`) runs row by row, and draws by the seed, the step and the row's position in
    the batch. Evaluation uses Flax's `eval` mode. Layers may hold other state as long as no call changes it.

    Args:
        layers: Layers in order.
        loss: Function of the last layer's output and the targets, which returns the loss of every target.
        flops: FLOPs of each layer for one sequence; by default two per parameter.
        between: Layout of the arrays between layers; by default the batch dim is split over `data` and `z`.

    Raises:
        UserError: A layer is no `nnx.Module`, or `flops` has the wrong length. In training, if a call changes the state
            of a layer, such as the running statistics of an `nnx.BatchNorm`.
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
        """Segments of the model, one per layer."""
        segments = []
        parts = split_module(self)
        forms: list[object] = []  # distinct forms so far; layers with equal forms can share a compiled program
        for index, layer in enumerate(self.layers):
            params = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)))
            # Without a user's figure assume matmuls, at one multiplication and one addition per parameter.
            flops = 2 * params if self._flops is None else self._flops[index]
            name, form = f"layers.{index}", self._form(index, parts)
            if form is not None and form not in forms:
                forms.append(form)
            alike = "" if form is None else str(forms.index(form))
            segments.append(Segment(name, flops, params, name, alike))
        return tuple(segments)

    def _form(self, index: int, parts: SplitModule) -> object:
        # None for a layer that cannot share a program: it shares parameters with another layer, or has other state.
        layer = self.layers[index]
        form = layer_form(layer, f"layers.{index}.", parts)
        shared = len(form.params) < len(nnx.to_flat_state(nnx.state(layer, nnx.Param)))
        reused = sum(other_layer is layer for other_layer in self.layers) > 1
        return None if shared or reused or form.state else form

    def counts(self, names: frozenset[str]) -> None:
        """Return None: these layers have no parameters whose gradients are counts."""

    def check_grid(self, grid: GridShape) -> None:
        """Accept every grid; the layers check their own parameters."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """Return the tokens unchanged for the first layer; `dtype` is ignored, layers choose their own."""
        return tokens

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> jax.Array:
        """Return the received values unchanged."""
        return x

    def run_layer(self, layer: nnx.Module, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run a layer in training mode with a key, else in Flax's `eval` mode; row by row if it has random streams."""
        split: Any = nnx.split(layer, nnx.RngState, ...)
        graphdef, streams, other_state = split
        draws = bool(jax.tree.leaves(streams))

        # Work on a copy: the layer's own variables belong to an outer trace.
        def run(x: jax.Array, layer_key: jax.Array) -> jax.Array:
            live_layer = nnx.merge(graphdef, seeded(streams, layer_key), renewed(other_state))
            _set_mode(live_layer, training=key is not None, draws=draws)
            y = live_layer(x)
            _check_unchanged(live_layer, other_state)
            return y  # type: ignore[no-any-return]

        def run_row(row: jax.Array, layer_key: jax.Array) -> jax.Array:
            y = run(row[None], layer_key)
            if y.shape[:1] != (1,):
                shapes = f"{type(layer).__name__}, which draws and makes {y.shape} of {(1, *row.shape)}"
                raise UserError("model", shapes, "layers that draw and leave the first dim, a row of the batch each")
            return y[0]

        # A layer that draws even in evaluation gets the same key for every row, so that results do not depend on the
        # row's position in the batch.
        fixed_key = key_of(0)
        if not draws:
            return run(x, fixed_key)
        # Row by row, so that draws do not depend on how the grid or microbatches split the batch.
        keys = fixed_key if key is None else key.of_rows(len(x))
        return jax.vmap(run_row, (0, None if key is None else 0))(x, keys)

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run layer `number`."""
        layer_key = None if key is None else key.of_layer(number)
        if number:
            return self.run_layer(self.layers[number], x, layer_key)
        try:
            return self.run_layer(self.layers[0], x, layer_key)
        except (
            TypeError,
            ValueError,
        ) as error:  # the first layer of a model of images, for example, multiplies its input
            given = f"{type(self.layers[0]).__name__}, which fails on token ids {x.shape}: {str(error).splitlines()[0]}"
            accepted = "a layer that takes token ids [batch, seq]; ax.Trainer(model, ..., loss=loss) takes any batch"
            raise UserError("layers[0]", given, accepted) from error

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return the sum of the losses of all targets, weighted by `weights` if given."""
        losses = self._loss(x, targets)
        return jnp.sum(losses if weights is None else losses * weights)


def seeded(streams: Any, key: jax.Array) -> object:
    """Return random streams restarted from `key`, each with its own subkey and its count at zero."""
    begun = []
    for number, (path, var) in enumerate(nnx.to_flat_state(streams)):
        shape, var_key = var.get_value().shape, jax.random.fold_in(key, number)
        counts = isinstance(var, nnx.RngCount)
        begun.append((path, var.replace(jnp.zeros(shape, jnp.uint32) if counts else jax.random.split(var_key, shape))))
    return nnx.from_flat_state(begun)


def _set_mode(layer: nnx.Module, *, training: bool, draws: bool) -> None:
    # Some layers, such as `nnx.MultiHeadAttention`, leave `deterministic` None for the caller to choose.
    if not training:
        layer.eval()
    modules: list[Any] = [module for _, module in nnx.iter_modules(layer)]
    for module in modules:
        if getattr(module, "deterministic", False) is None:
            module.deterministic = False
        if isinstance(module, nnx.Dropout) and module.rate and not (module.deterministic or draws):
            value = f"nnx.Dropout({module.rate}) without rngs"
            raise UserError("model", value, "nnx.Dropout(rate, rngs=nnx.Rngs(seed))")


def _check_unchanged(layer: nnx.Module, old_state: Any) -> None:
    # Compare by identity: the values of tracers are not known.
    new_state = dict(nnx.to_flat_state(nnx.state(layer, nnx.Not(nnx.RngState))))
    for path, var in nnx.to_flat_state(old_state):
        pairs = zip(*(jax.tree.leaves(v.get_value()) for v in (var, new_state.get(path, var))), strict=True)
        if any(old is not new for old, new in pairs):
            state = f"{type(layer).__name__}, of which a call changes {'.'.join(map(str, path))} ({type(var).__name__})"
            accepted = "layers that change nothing but random streams: LayerNorm, BatchNorm(use_running_average=True)"
            raise UserError("model", state, accepted)
