"""One model of another author in a small size: how to make it, its loss, its batch. The sizes of all batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax
from any_flax.sources import Copies

VOCAB, SEQ, ROWS, CLASSES, SIDE = 128, 16, 8, 16, 32
"""Ids below VOCAB in ROWS rows of SEQ; ROWS images of SIDE x SIDE in CLASSES classes."""
WIDE, HEADS, FFN, LAYERS = 64, 4, 128, 2
"""Features, attention heads, hidden features of an MLP, blocks of all models that let them be chosen."""

Kind = Literal["text", "state space", "vision", "audio", "graph"]


@dataclass(frozen=True)
class Model:
    """One model, ready to be made."""

    make: Callable[[], Any]
    """Makes an NNX module; for Linen the tree of parameters."""
    loss: Callable[[Any, Any], Any]
    """A scalar of the model (Linen: of the parameters) and the batch."""
    batch: Any
    """Leaves with as many rows as the first one are split; others, such as a graph's edges, lie on every device."""
    forward: Callable[[Any, Any], Any] | None = None
    """The call that `parallelize` traces, of an NNX model and the batch."""


@dataclass(frozen=True)
class Stranger:
    """One row of the table."""

    source: str
    """Key of `SOURCES`."""
    kind: Kind
    linen: bool
    load: Callable[[Copies], Model]
    """Imports the package, whose folder is on the import path."""


def token_ids() -> np.ndarray:
    """Ids without padding, [ROWS, SEQ]."""
    return np.random.default_rng(0).integers(1, VOCAB, (ROWS, SEQ)).astype(np.int32)


def images() -> np.ndarray:
    """Noise, [ROWS, SIDE, SIDE, 3]."""
    return np.random.default_rng(1).normal(size=(ROWS, SIDE, SIDE, 3)).astype(np.float32)


def labels() -> np.ndarray:
    """A class for every image."""
    return np.random.default_rng(2).integers(0, CLASSES, (ROWS,)).astype(np.int32)


def cross_entropy(logits: Any, targets: Any) -> Any:
    """The mean over all targets, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def language_model(make: Callable[[], Any], logits: Callable[[Any, Any], Any]) -> Model:
    """An NNX model of token ids that predicts them."""
    return Model(make, lambda m, ids: cross_entropy(logits(m, ids), ids), token_ids(), logits)


def classifier(make: Callable[[], Any], logits: Callable[[Any, Any], Any]) -> Model:
    """An NNX model of images and their labels."""
    return Model(
        make,
        lambda m, batch: cross_entropy(logits(m, batch[0]), batch[1]),
        (images(), labels()),
        lambda m, batch: logits(m, batch[0]),
    )


def distance(outputs: Any) -> Any:
    """The mean square from a wave over the features; from a constant, a norm at the end would leave no gradient."""
    return jnp.mean((outputs.astype(jnp.float32) - jnp.cos(jnp.arange(outputs.shape[-1]))) ** 2)


def regression(make: Callable[[], Any], outputs: Callable[[Any, Any], Any], batch: Any) -> Model:
    """An NNX model without a loss of its own."""
    return Model(make, lambda m, b: distance(outputs(m, b)), batch, outputs)
