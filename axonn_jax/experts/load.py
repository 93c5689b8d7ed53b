"""Loads of experts: tokens per expert, counted as the gradient of the router's bias, which loads may move.

No loss depends on the bias. So the bias's gradient can carry counts: sums over microbatches and devices as for
gradients, in any engine, without a separate result or collective. Counts are float32 in every precision, and exact up
to 16 million choices of an expert a device and microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonn_jax import compat
from axonn_jax.tensor.collectives import mark_varying


def counting(weights: jax.Array, bias: jax.Array, choices: jax.Array) -> jax.Array:
    """Hand on weights [tokens, k]; the gradient of bias [experts] is how often `choices` [tokens, k] name each."""
    return _counting(weights, mark_varying(bias, compat.varying_axes(choices)), choices)


@jax.custom_vjp
def _counting(weights: jax.Array, bias: jax.Array, choices: jax.Array) -> jax.Array:
    return weights


def _backward(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    bias, choices = kept
    counts = counted(choices.reshape(1, -1), bias.size)[0]
    return dy, counts.astype(bias.dtype), np.zeros(choices.shape, jax.dtypes.float0)


_counting.defvjp(lambda weights, bias, choices: (weights, (bias, choices)), _backward)


def counted(choices: jax.Array, experts: int) -> jax.Array:
    """Counts of choices [rows, any] by expert, [rows, experts] float32; numbers of no expert are left out."""
    rows = choices.shape[0]
    none = mark_varying(jnp.zeros((rows, experts), jnp.float32), compat.varying_axes(choices))
    return none.at[jnp.arange(rows)[:, None], choices].add(1.0, mode="drop")


@dataclass(frozen=True)
class Loads:
    """Counts of the experts' tokens among a step's gradients.

    They are sums over microbatches and devices that no loss depends on. So a layer measures a step and moves a
    parameter of its own, in every engine and without a further collective.
    """

    names: frozenset[str]
    """Parameters whose gradients are counts: the routers' biases."""
    rate: float
    """Step of a bias after each update; 0: biases stay."""

    metric = "largest_load"
    """Name of the metric in a step's results."""

    def measure(self, grads: Mapping[str, jax.Array]) -> jax.Array:
        """Return the most loaded expert's share of the choices over the mean one's, of the worst layer in `grads`."""
        counts = [grads[name] for name in sorted(self.names) if name in grads]
        return jnp.max(jnp.stack([jnp.max(jnp.max(c, -1) / jnp.mean(c, -1)) for c in counts]))

    def centred(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Replace counts in gradients by each expert's excess over the mean.

        The excess of a sum is the sum of its terms' excesses.
        """

        def excess(counts: jax.Array) -> jax.Array:
            return counts - jnp.mean(counts, axis=-1, keepdims=True)

        return {name: excess(grad) if name in self.names else grad for name, grad in grads.items()}

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return `tx`, by which routers' biases move against the sign of their experts' excesses by `rate`.

        So experts with more tokens than the mean are chosen less in the next step, without a loss (DeepSeek-V3, arXiv
        2412.19437, section 2.1.2). For these parameters the optimizer itself gets zeros, and its updates do not count.
        """
        names, rate = self.names, self.rate

        def moves(excess: jax.Array) -> jax.Array:
            return -rate * jnp.sign(excess) if rate else jnp.zeros_like(excess)

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            own = {name: jnp.zeros_like(grad) if name in names else grad for name, grad in grads.items()}
            biases = {name: moves(grad) for name, grad in grads.items() if name in names}
            updates, state = optax.with_extra_args_support(tx).update(own, state, params, biases=biases, **extra)
            return {**updates, **biases}, state  # type: ignore[dict-item]

        return optax.GradientTransformationExtraArgs(tx.init, update)  # type: ignore[arg-type]
