"""The protocol between models and whoever trains, cuts into stages, plans or runs them."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.experts.load import Loads
from axonn_jax.grid import GridShape
from axonn_jax.models.segments import Segment
from axonn_jax.tensor.elementwise import DropoutKey


@runtime_checkable
class Model(Protocol):
    """Token ids -> residual stream -> layers in a row -> loss, called on local shards inside `jax.shard_map`.

    A model defines the computation. Its caller decides on places of layers, sub-batches and recomputation.
    """

    layer_list: ClassVar[str]
    """Attribute that holds the layers: a list, or `models.stacked.Stacked`."""

    @property
    def layer_period(self) -> int:
        """After so many layers one comes that differs in its parameters' values alone, so that a loop can run them.

        0: layers are not known to be alike.
        """

    @property
    def balanced(self) -> bool:
        """True if layers add losses of their own to the gradients, as experts do."""

    @property
    def vocab(self) -> int | None:
        """Number of token ids; None: unknown."""

    @property
    def seq_len(self) -> int | None:
        """Longest sequence in tokens; None: any."""

    @property
    def drops_out(self) -> bool:
        """True if training takes a `DropoutKey`."""

    @property
    def packed(self) -> bool:
        """True if tokens are the words of `models.packed`."""

    @property
    def reads_words(self) -> bool:
        """True if layers look at the batch: at the beginnings of documents, or at padding for experts."""

    @property
    def residual_spec(self) -> P:
        """Layout of the residual stream between segments, batch dim first."""

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens: over those that do not split a parameter, its gradients are partial sums."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The smallest parts that a pipeline stage can hold, in order, with their costs."""

    def counts(self, names: frozenset[str]) -> Loads | None:
        """Return the meaning of gradients of these names, which are counts; None where there are none."""

    def check_grid(self, grid: GridShape) -> None:
        """Raise ``UserError`` where the model does not divide over a grid."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """Return the first layer's input, in `dtype`, for the ids that `models.packed.inputs_of` gives."""

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> Any:
        """Return the first layer's input in a later stage: the arrived values, and the batch if it `reads_words`."""

    def run_layer(self, layer: Any, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Call one of the layers, with its own key."""

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Run the layers of a segment, or the part of one that it is, with the model's key."""

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return the sum of the losses of targets [batch, seq], times `weights` [batch, seq], from the last layer's
        output."""


def check_model(model: object) -> Model:
    """Return the model; raises ``UserError`` for one that cannot be trained in parts."""
    if not isinstance(model, Model):
        accepted = "a Transformer or a SequenceModel of layers; any other Flax model trains with loss="
        raise UserError("model", type(model).__name__, accepted)
    return model


RunLayer = Callable[[Any, tuple[jax.Array, ...], DropoutKey | None], tuple[jax.Array, ...]]
"""Function that runs (a layer, on every sub-batch, with its key); activation policies wrap it."""
