"""Expert loads: tokens per expert, carried as the gradient of the router's bias."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from axonn_jax.core import compat
from axonn_jax.core.tensor.collectives import mark_varying

# No loss depends on the router's bias, so its gradient is free to carry the counts. They are then summed over
# microbatches and devices as any gradient is, in every engine, without an extra output or collective.


def counting(weights: jax.Array, bias: jax.Array, choices: jax.Array) -> jax.Array:
    """Return weights [tokens, k] unchanged, and define the gradient of bias [experts] as the counts of `choices`."""
    return _counting(weights, mark_varying(bias, compat.varying_axes(choices)), choices)


@jax.custom_vjp
def _counting(weights: jax.Array, bias: jax.Array, choices: jax.Array) -> jax.Array:
    return weights


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array, np.ndarray]:
    bias, choices = residuals
    # float32 in every precision: exact up to 2**24 choices of an expert per device and microbatch.
    counts = counted(choices.reshape(1, -1), bias.size)[0]
    return dy, counts.astype(bias.dtype), np.zeros(choices.shape, jax.dtypes.float0)


_counting.defvjp(lambda weights, bias, choices: (weights, (bias, choices)), _backward)


def counted(choices: jax.Array, experts: int) -> jax.Array:
    """Count choices [rows, any] by expert, as [rows, experts] float32; out-of-range numbers are ignored."""
    rows = choices.shape[0]
    zeros = mark_varying(jnp.zeros((rows, experts), jnp.float32), compat.varying_axes(choices))
    return zeros.at[jnp.arange(rows)[:, None], choices].add(1.0, mode="drop")


@dataclass(frozen=True)
class Loads:
    """Expert token counts among a step's gradients: the load metric, and the update of the routers' biases."""

    names: frozenset[str]
    """Parameters whose gradients are counts: the routers' biases."""
    rate: float
    """Step size of the biases at each update; 0 keeps them fixed."""

    metric = "largest_load"
    """Key of the metric in a step's results."""

    def measure(self, grads: Mapping[str, jax.Array]) -> jax.Array:
        """Return the largest load over the mean load of a layer's experts, for the worst layer in `grads`."""
        counts = [grads[name] for name in sorted(self.names) if name in grads]
        return jnp.max(jnp.stack([jnp.max(jnp.max(c, -1) / jnp.mean(c, -1)) for c in counts]))

    def centred(self, grads: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return gradients with each count replaced by its excess over the mean of the layer's experts."""

        # Linear, so the excess of a sum of counts is the sum of their excesses: centering and reducing commute.
        def excess(counts: jax.Array) -> jax.Array:
            return counts - jnp.mean(counts, axis=-1, keepdims=True)

        return {name: excess(grad) if name in self.names else grad for name, grad in grads.items()}

    def optimizer(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Wrap `tx` so that each router bias moves by `rate` against the sign of its expert's excess load.

        Overloaded experts are chosen less often in the next step, without an auxiliary loss (DeepSeek-V3, arXiv
        2412.19437, section 2.1.2).
        """
        names, rate = self.names, self.rate

        def moves(excess: jax.Array) -> jax.Array:
            return -rate * jnp.sign(excess) if rate else jnp.zeros_like(excess)

        def update(
            grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
        ) -> tuple[optax.Updates, optax.OptState]:
            # Zeros keep the counts out of the optimizer's state; its updates of the biases are overwritten below.
            inner_grads = {name: jnp.zeros_like(grad) if name in names else grad for name, grad in grads.items()}
            biases = {name: moves(grad) for name, grad in grads.items() if name in names}
            updates, state = optax.with_extra_args_support(tx).update(
                inner_grads, state, params, biases=biases, **extra
            )
            return {**updates, **biases}, state  # type: ignore[dict-item]

        return optax.GradientTransformationExtraArgs(tx.init, update)  # type: ignore[arg-type]
