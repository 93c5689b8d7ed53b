"""Optimizer state of stacked layers and of the layers' own parameters: the same values in two trees."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path

from axonn_jax.models.stacked import Stack, rows
from axonn_jax.train.layerwise import LayerwiseState, owner

Key = tuple[Any, ...]


def own_state(optimizer: optax.GradientTransformation, stack: Stack, state: Any) -> Any:
    """The state of `layerwise` as the optimizer's own, under the layers' names; stacked arrays are copied."""
    if not stack.own:
        return state
    known = {own: (name, i) for name, layers in stack.own.items() for i, own in enumerate(layers)}
    rest, every = (dict(tree_leaves_with_path(part)) for part in state)
    split: dict[Key, list[jax.Array]] = {}

    def one(path: Key, _: Any) -> Any:
        own = owner(path, known)
        if own is None:
            return rest[path]
        name, index = known[own]
        key = _with(path, own, name)
        if key not in split:
            split[key] = rows(every[key])
        return split[key][index]

    return tree_map_with_path(one, jax.eval_shape(optimizer.init, stack.shapes()))


def stacked_state(stack: Stack, state: Any, like: Any) -> Any:
    """The way back from `own_state`; `like` is a state of `layerwise`, whose layouts it gets."""
    if not stack.own:
        return state
    leaves = dict(tree_leaves_with_path(state))

    def one(path: Key, want: Any) -> Any:
        name = owner(path, stack.own)
        if name is None:  # both parts have one of their own, since a step's state is donated
            return jax.device_put(jnp.copy(leaves[path]), want.sharding)
        layers = [leaves[_with(path, name, own)] for own in stack.own[name]]
        return jax.device_put(jnp.stack(layers), want.sharding)

    return LayerwiseState(*(tree_map_with_path(one, part) for part in like))


def _with(path: Key, name: str, other: str) -> Key:
    """The path with another parameter's name in the place of `name`."""
    return tuple(DictKey(other) if isinstance(key, DictKey) and key.key == name else key for key in path)
