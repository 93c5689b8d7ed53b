"""Dynamic loss scaling: float16 gradients are kept in range by a factor that finds its own size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**10
CLEAN_STEPS = 200
"""Steps without overflow after which the factor doubles (AxoNN, IPDPS 22; `inter_layer.py` of its code)."""


class LossScale(NamedTuple):
    """The factor on the loss and what it depends on; scalars."""

    factor: jax.Array
    """float32: the loss is multiplied by it before the backward pass."""
    clean: jax.Array
    """int32: steps without overflow since it last changed."""
    skipped: jax.Array
    """int32: steps of the whole run that were skipped."""


def first_scale() -> LossScale:
    """The state a run starts with."""
    return LossScale(jnp.float32(FIRST), jnp.int32(0), jnp.int32(0))


def next_scale(scale: LossScale, finite: jax.Array) -> LossScale:
    """Halves the factor after an overflow and doubles it after 200 clean steps, within its limits."""
    clean = jnp.where(finite, scale.clean + 1, 0)
    grown = clean == CLEAN_STEPS
    up = jnp.where(grown, scale.factor * 2, scale.factor)
    factor = jnp.clip(jnp.where(finite, up, scale.factor / 2), SMALLEST, LARGEST)
    return LossScale(factor, jnp.where(grown, 0, clean), scale.skipped + jnp.where(finite, 0, 1))


class HostScale:
    """A loss scale that the host keeps, for a step that it decides on."""

    def __init__(self) -> None:
        self.state = first_scale()

    @property
    def factor(self) -> float:
        """What the loss is multiplied by."""
        return float(self.state.factor)

    @property
    def skipped(self) -> int:
        """Steps of the run that were skipped."""
        return int(self.state.skipped)

    def tell(self, finite: bool) -> None:
        """Takes note of whether a step's gradients were finite."""
        self.state = next_scale(self.state, jnp.bool_(finite))

    def on(self, mesh: Mesh) -> LossScale:
        """The state on all devices of a mesh, also where other processes hold some of them."""
        return LossScale(*(_everywhere(np.asarray(value), NamedSharding(mesh, P())) for value in self.state))


def _everywhere(number: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback((), sharding, lambda _: number)
