"""Moving average of the weights, kept in an optimizer's state."""

from typing import Any, NamedTuple

import jax
import optax


class Averaged(NamedTuple):
    """State of an optimizer that averages the weights."""

    average: Any
    """Average of the weights after each update, in their tree."""
    state: Any
    """State of the optimizer itself."""


def averaging(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose state also has a moving average of the weights (Polyak and Juditsky, 1992).

    Args:
        optimizer: The optimizer of the weights.
        decay: Share of the average that stays: `average = decay * average + (1 - decay) * weights` after each update;
            the first average is the weights at the start.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Averaged:
        return Averaged(params, optimizer.init(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Averaged]:
        updates, inner = optimizer.update(grads, state.state, params, **extra)
        after = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.average, after)
        return updates, Averaged(average, inner)

    return optax.GradientTransformationExtraArgs(init, update)
