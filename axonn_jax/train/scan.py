"""Whether a model's layers are one compiled body that a loop runs, or a copy of it for each."""

from typing import Any

import jax
import optax
from flax import nnx

from axonn_jax.errors import UserError
from axonn_jax.models.stacked import Stack, stack_layers
from axonn_jax.tensor.params import take_apart
from axonn_jax.train.config import ScanLayers
from axonn_jax.train.layerwise import check_layerwise

LAYERS = 32
"""Layers from which `auto` scans them: docs/results/compile.md has what was measured."""


def choose_stack(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    wanted: ScanLayers,
    *,
    activations: str = "none",
    ordered: bool = False,
) -> Stack:
    """The model's parts as its programs hold them: layers stacked where they are scanned, as they are elsewhere.

    `auto` scans many layers, and on the CPU backend, which undoes recomputation outside of loops, any that are computed
    again in the backward pass; but not where the package orders the computation (`ordered`), which hides a layer's
    communication behind other layers and sees them only unrolled. Raises ``UserError`` where model or optimizer
    cannot be scanned though it is `wanted`.
    """
    parts = take_apart(model)
    plain = Stack(parts)
    layers: Any = getattr(model, getattr(model, "repeats", ""), ())
    recomputed = activations != "none" and jax.default_backend() == "cpu"
    pays = not ordered and (recomputed or len(layers) >= LAYERS)
    if wanted == "no" or (wanted == "auto" and not pays):
        return plain
    try:
        stack = stack_layers(model)
        check_layerwise(optimizer, stack, parts.params)
    except UserError:
        if wanted == "auto":
            return plain
        raise
    return stack
