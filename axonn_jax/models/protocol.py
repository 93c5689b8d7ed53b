"""The protocol between models and whoever trains, cuts into stages, plans or runs them."""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.segments import Segment
from axonn_jax.tensor.dropout import DropoutKey


@runtime_checkable
class Model(Protocol):
    """Token ids -> residual stream -> layers in a row -> loss, called on local shards inside `jax.shard_map`.

    A model says what is computed. Which layers run where, in how many sub-batches, and what is kept or computed again
    is up to who calls it.
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
        """Whether layers add losses of their own to the gradients, as experts do."""

    @property
    def balance_rate(self) -> float | None:
        """What routers' biases move by behind a step (`experts.load.balancing`); None: there are no experts."""

    @property
    def vocab(self) -> int | None:
        """Number of token ids; None: unknown."""

    @property
    def seq_len(self) -> int | None:
        """Longest sequence in tokens; None: any."""

    @property
    def drops_out(self) -> bool:
        """Whether training takes a `DropoutKey`."""

    @property
    def packed(self) -> bool:
        """Whether tokens are the words of `models.packed`."""

    @property
    def reads_words(self) -> bool:
        """Whether layers look at the batch: at where documents begin, or at what experts are to see."""

    @property
    def residual_spec(self) -> P:
        """Layout of what one segment hands to the next, batch dim first."""

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split tokens: over those that do not split a parameter, its gradients are partial sums."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The smallest parts that a pipeline stage can hold, in order, with their costs."""

    def check_grid(self, grid: GridShape) -> None:
        """Raises ``UserError`` where the model does not divide over a grid."""

    def embed(self, tokens: jax.Array, dtype: jnp.dtype, key: DropoutKey | None = None) -> jax.Array:
        """What `models.packed.inputs_of` gives of a batch -> what the first layer takes, in `dtype`."""

    def continued(self, x: jax.Array, tokens: jax.Array | None) -> Any:
        """What the first layer of a later stage takes: what has arrived, and the batch if it `reads_words`."""

    def run_layer(self, layer: Any, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Calls one of the layers, with its own key."""

    def run_segment(self, number: int, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Runs the layers of a segment, or the part of one that it is, with the model's key."""

    def total_loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """What the last layer gives, targets [batch, seq] -> sum of their losses, times `weights` [batch, seq]."""


def check_model(model: object) -> Model:
    """Returns the model; raises ``UserError`` for one that cannot be trained in parts."""
    if not isinstance(model, Model):
        raise UserError("model", type(model).__name__, "a Transformer or a SequenceModel of layers")
    return model


RunLayer = Callable[[Any, tuple[jax.Array, ...], DropoutKey | None], tuple[jax.Array, ...]]
"""Runs (a layer, on every sub-batch, with its key): what activation policies wrap."""
