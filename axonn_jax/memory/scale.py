"""Steps that are skipped because they are not finite, and the loss scale that keeps float16 gradients in range."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**10
CLEAN_STEPS = 200
"""Steps without overflow after which the factor doubles (AxoNN, IPDPS 22; `inter_layer.py` of its code)."""


class SkipCount(NamedTuple):
    """What a run remembers from step to step where its loss is not scaled."""

    skipped: Any
    """int32 scalar: steps of the whole run that were skipped."""


class LossScale(NamedTuple):
    """The factor on the loss and what it depends on; scalars."""

    factor: Any
    """float32: the loss is multiplied by it before the backward pass."""
    clean: Any
    """int32: steps without overflow since it last changed."""
    skipped: Any
    """int32: steps of the whole run that were skipped."""


Scale = LossScale | SkipCount


def first_scale(*, scaled: bool = True) -> Scale:
    """The state a run starts with, numbers of the host."""
    none = np.int32(0)
    return LossScale(np.float32(FIRST), none, none) if scaled else SkipCount(none)


def next_scale(scale: Scale, finite: Any, numbers: ModuleType = jnp) -> Scale:
    """Counts a step that was not finite. Halves the factor then, and doubles it after 200 clean steps, within limits.

    `numbers` is numpy where all of them are of the host.
    """
    skipped = scale.skipped + (~finite).astype(np.int32)
    if isinstance(scale, SkipCount):
        return SkipCount(skipped)
    none = np.int32(0)
    clean = numbers.where(finite, scale.clean + np.int32(1), none)
    grown = clean == CLEAN_STEPS
    up = numbers.where(grown, scale.factor * 2, scale.factor)
    factor = numbers.clip(numbers.where(finite, up, scale.factor / 2), SMALLEST, LARGEST)
    return LossScale(factor, numbers.where(grown, none, clean), skipped)


def on_mesh(scale: Scale, mesh: Mesh) -> Scale:
    """The state on all devices of a mesh, also where other processes hold some of them."""
    sharding = NamedSharding(mesh, P())
    return type(scale)(*(_everywhere(np.asarray(value), sharding) for value in scale))


class HostScale:
    """The same state for a step that the host decides on; no device is asked."""

    def __init__(self, *, scaled: bool) -> None:
        self.state = first_scale(scaled=scaled)

    @property
    def factor(self) -> float | None:
        """What the loss is multiplied by; None where it is not."""
        return float(self.state.factor) if isinstance(self.state, LossScale) else None

    @property
    def skipped(self) -> int:
        """Steps of the run that were skipped."""
        return int(self.state.skipped)

    def tell(self, *, finite: bool) -> None:
        """Takes note of whether a step was finite."""
        self.state = next_scale(self.state, np.bool_(finite), np)

    def restore(self, scale: Scale) -> None:
        """Goes on from a state, on devices perhaps."""
        self.state = type(scale)(*(np.asarray(value) for value in scale))


def _everywhere(number: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback((), sharding, lambda _: number)
