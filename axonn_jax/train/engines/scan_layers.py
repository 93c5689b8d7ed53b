"""Scanned layers: the choice to run a model's layers as a loop."""

from typing import Any

import jax
import optax
from flax import nnx

from axonn_jax.backend.traits import merges_recomputation
from axonn_jax.errors import UserError
from axonn_jax.models.protocol import check_model
from axonn_jax.models.stacked import Stack, stack_layers, unstacked
from axonn_jax.options import ScanLayers
from axonn_jax.state.scanned import check_per_layer
from axonn_jax.tensor.params import SplitModule

LAYERS = 32
"""Layers from which `auto` scans them, by the measurements in docs/results.md."""


def choose_stack(
    model: nnx.Module,
    split: SplitModule,
    optimizer: optax.GradientTransformation,
    wanted: ScanLayers,
    *,
    activations: str = "none",
    ordered: bool = False,
) -> Stack:
    """Return the split model in its programs' form: scanned layers are stacked, others unchanged.

    `auto` scans many layers, and on the CPU backend, which undoes recomputation outside of loops, any that are computed
    again in the backward pass; but not where the package orders the computation (`ordered`), which hides a layer's
    communication behind other layers. Raises ``UserError`` where scanning is `wanted` and impossible.
    """
    plain = unstacked(split)
    checked = check_model(model)
    layers: Any = getattr(model, checked.layer_list) if checked.layer_period else ()
    recomputed = activations != "none" and merges_recomputation(jax.default_backend())
    pays = not ordered and (recomputed or len(layers) >= LAYERS)
    if wanted == "no" or (wanted == "auto" and not pays):
        return plain
    try:
        stack = stack_layers(model, split)
        check_per_layer(optimizer, stack)
    except UserError:
        if wanted == "auto":
            return plain
        raise
    return stack
