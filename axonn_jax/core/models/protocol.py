"""Protocol between models and the code that trains, partitions, plans or runs them."""

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.load import Loads
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.tensor.elementwise import DropoutKey


@runtime_checkable
class Model(Protocol):
    """Sequence of token embedding, layers and loss, called on local shards inside `jax.shard_map`.

    A model defines the computation; its caller decides on the placement of layers, sub-batches and recomputation.
    """

    layer_list: ClassVar[str]
    """Attribute that holds the layers: a list, or `models.stacked.Stacked`."""

    @property
    def layer_period(self) -> int:
        """Period of the kinds of layers: layers this far apart differ only in parameter values, so a scan can run them.

        0: layers are not known to repeat.
        """

    @property
    def balanced(self) -> bool:
        """True if layers contribute auxiliary losses to the gradients, as experts do."""

    @property
    def vocab(self) -> int | None:
        """Number of token ids; None if unknown."""

    @property
    def seq_len(self) -> int | None:
        """Maximum sequence length in tokens; None if unbounded."""

    @property
    def drops_out(self) -> bool:
        """True if training needs a `DropoutKey`."""

    @property
    def packed(self) -> bool:
        """True if batches are packed words of `models.packed`."""

    @property
    def reads_words(self) -> bool:
        """True if layers need the batch itself: document starts, or padding for experts."""

    @property
    def residual_spec(self) -> P:
        """Layout of the residual stream between segments; the batch dim is first."""

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens; a parameter's gradient is a partial sum over those that do not split it."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Smallest parts that a pipeline stage can hold, in order, with their costs."""

    def counts(self, names: frozenset[str]) -> Loads | None:
        """Return how to read the gradients of these names, which are counts; None if there are no names."""

    def check_grid(self, grid: GridShape) -> None:
        """Raise ``UserError`` unless the model divides over the grid."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """Return the first layer's input in `dtype`, for the result of `models.packed.inputs_of`."""

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> object:
        """Return the input of a later stage's first layer: received values, and what layers need of the batch."""

    def run_layer(self, layer: nnx.Module, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run a layer; `key` is the layer's."""

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run a segment, which holds layers or part of a layer; `key` is the model's."""

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return the sum of losses for the last layer's output and targets [batch, seq], weighted by `weights`."""


def check_model(model: object) -> Model:
    """Return the model typed as a `Model`; raises ``UserError`` if it does not implement the protocol."""
    if not isinstance(model, Model):
        accepted = "a Transformer or a SequenceModel of layers; any other Flax model trains with loss="
        raise UserError("model", type(model).__name__, accepted)
    return model


RunLayer = Callable[[nnx.Module, tuple[jax.Array, ...], DropoutKey | None], tuple[jax.Array, ...]]
"""Function that runs a layer on all sub-batches with its key; activation policies wrap it."""
