"""Choice of scanned layers: whether a model's layers run as a loop."""

import jax
import optax
from flax import nnx

from axonn_jax.core.backend.traits import merges_recomputation
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.models.stacked import Stack, stack_layers, unstacked
from axonn_jax.core.options import ScanLayers
from axonn_jax.core.state.scanned import check_per_layer
from axonn_jax.core.tensor.params import SplitModule

LAYERS = 32
"""Number of layers from which `auto` scans them, by the measurements in docs/results.md."""


def choose_stack(
    model: nnx.Module,
    split: SplitModule,
    optimizer: optax.GradientTransformation,
    requested: ScanLayers,
    *,
    activations: str = "none",
    ordered: bool = False,
) -> Stack:
    """Return the split model with its layers stacked if they are to be scanned, else unchanged.

    Args:
        model: The model.
        split: Its parameters, split off.
        optimizer: Optimizer, which must treat all scanned layers alike.
        requested: `tensor.scan_layers`.
        activations: Activation policy.
        ordered: Whether the package orders the computation.

    Raises:
        UserError: `requested` demands scanning, and it is impossible.
    """
    plain = unstacked(split)
    checked = check_model(model)
    layers = getattr(model, checked.layer_list) if checked.layer_period else ()
    # The CPU backend undoes recomputation outside loops. An ordered computation hides a layer's communication behind
    # other layers, which a loop would prevent.
    recomputed = activations != "none" and merges_recomputation(jax.default_backend())
    pays = not ordered and (recomputed or len(layers) >= LAYERS)
    if requested == "no" or (requested == "auto" and not pays):
        return plain
    try:
        stack = stack_layers(model, split)
        check_per_layer(optimizer, stack)
    except UserError:
        if requested == "auto":
            return plain
        raise
    return stack
