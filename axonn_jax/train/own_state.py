"""Stacked layers' parameters and optimizer state under the layers' own names: the same values in two trees."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path

from axonn_jax.memory.held import LayerSlice, whole
from axonn_jax.models.stacked import Stack, join_layers
from axonn_jax.train.layerwise import LayerwiseState, owner

Key = tuple[Any, ...]


def own_params(stack: Stack, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under the layers' own names, of stacked ones a `LayerSlice`; nothing is copied."""
    own: dict[str, Any] = {}
    for name, value in params.items():
        layers = stack.own.get(name)
        own |= {name: value} if layers is None else {layer: LayerSlice(value, i) for i, layer in enumerate(layers)}
    return own


def own_state(optimizer: optax.GradientTransformation, stack: Stack, state: Any) -> Any:
    """The state of `layerwise` as the optimizer's own, under the layers' names, as `own_params` gives parameters."""
    if not stack.own:
        return state
    known = {own: (name, i) for name, layers in stack.own.items() for i, own in enumerate(layers)}
    rest, every = (dict(tree_leaves_with_path(part)) for part in state)

    def find(path: Key, _: Any) -> Any:
        own = owner(path, known)
        if own is None:
            return rest[path]
        name, layer = known[own]
        return LayerSlice(every[_with(path, own, name)], layer)

    return tree_map_with_path(find, jax.eval_shape(optimizer.init, stack.shapes()))


def stacked_state(stack: Stack, state: Any, like: Any, *, used_up: bool = False) -> Any:
    """The way back from `own_state`; `like` is a state of `layerwise`, whose layouts it gets.

    With `used_up` what was stacked is taken over, and layers' arrays are deleted kind by kind, so that both forms of
    only one kind take memory.
    """
    if not stack.own:
        return state
    leaves = dict(tree_leaves_with_path(state))
    taken: set[Key] = set()

    def join(path: Key, want: Any) -> Any:
        name = owner(path, stack.own)
        if name is None:  # of a count both parts have one of their own, since a step's state is donated
            copied = path in taken or not used_up
            taken.add(path)
            return jax.device_put(jnp.copy(leaves[path]) if copied else leaves[path], want.sharding)
        layers = [leaves[_with(path, name, own)] for own in stack.own[name]]
        if used_up and isinstance(layers[0], LayerSlice):
            return layers[0].stacked
        return join_layers(whole(layers), want.sharding, used_up=used_up)

    return LayerwiseState(*(tree_map_with_path(join, part) for part in like))


def _with(path: Key, name: str, other: str) -> Key:
    """The path with another parameter's name in the place of `name`."""
    return tuple(DictKey(other) if isinstance(key, DictKey) and key.key == name else key for key in path)
