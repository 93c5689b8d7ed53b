"""State of scanned layers: the optimizer on stacked parameters, and the state under the layers' own names.

Users, checkpoints and optimizers see the layers' own names; between steps nothing is kept under them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path

from axonn_jax.errors import UserError
from axonn_jax.memory.host_arrays import LayerSlice, joined, layer_of
from axonn_jax.memory.optimizer_traits import check_separable, owner, same_update, traced_update
from axonn_jax.models.stacked import Stack, join_layers

_ACCEPTED = "one that updates every layer by itself and in the same way, or tensor.scan_layers = no"


def per_layer(optimizer: optax.GradientTransformation, stack: Stack) -> optax.GradientTransformation:
    """Return the optimizer for stacked parameters; it sees one layer, under the names of the first layer.

    Its update is traced once and mapped over the layers (`jax.vmap`), so transformations that depend on a parameter's
    dims or norm (masks by `ndim`, trust ratios, factored moments) give the results of a layer's own array. Its state
    has the layers' dim in front of arrays that belong to a stacked parameter. The optimizer must pass
    `check_per_layer`.
    """
    if not stack.own:
        return optimizer
    first = {name: layers[0] for name, layers in stack.own.items()}
    stacked = {layer: name for name, layer in first.items()}
    rest = {name for name in stack.parts.params if name not in first}

    def divided(tree: Any) -> tuple[Any, Any]:
        """Split a tree into the rest's entries, and the stacked parameters' under the names of the first layer."""
        return (
            _with_keys(tree, lambda key: None if key in first else key),
            _with_keys(tree, lambda key: None if key in rest else first.get(key, key)),
        )

    def united(rest: Any, layers: Any) -> Any:
        return _union(rest, _with_keys(layers, lambda key: stacked.get(key, key)))

    def axes(layers: Mapping[str, Any]) -> Any:
        """Return axes of the parameters' state: 0 for an array with a parameter's leading dim, else None."""
        layer: Any = {name: jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for name, p in layers.items()}
        state = jax.eval_shape(optimizer.init, layer)
        return tree_map_with_path(lambda path, _: None if owner(path, layers) is None else 0, state)

    def init(params: Any) -> Any:
        others, layers = divided(params)
        return united(optimizer.init(others), jax.vmap(optimizer.init, out_axes=axes(layers))(layers))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        (others, layers), (grads, layers_grads), (state, layers_state) = map(divided, (params, grads, state))
        over = axes(layers)
        own_update = partial(optax.with_extra_args_support(optimizer).update, **extra)
        updates, state = own_update(grads, state, others)
        mapped = jax.vmap(own_update, in_axes=(0, over, 0), out_axes=(0, over))
        layers_updates, layers_state = mapped(layers_grads, layers_state, layers)
        return united(updates, layers_updates), united(state, layers_state)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def check_per_layer(optimizer: optax.GradientTransformation, stack: Stack) -> None:
    """Raise ``UserError`` where `per_layer` would differ from the optimizer on the layers' own parameters.

    Found out by trying: a layer's update must not depend on other parameters, must be the same computation under the
    names of every layer, and its state beside the moments must not depend on the layer.
    """
    params = stack.per_layer.params
    layers = [list(names) for names in zip(*stack.own.values(), strict=True)]
    own = {name for names in layers for name in names}
    rest = {name: p for name, p in params.items() if name not in own}
    pair = {name: params[name] for names in layers[:2] for name in names}
    first, *others = (traced_update(optimizer, {name: params[name] for name in names}) for names in layers)
    try:
        check_separable(optimizer, rest | pair, layers[0])
    except UserError as error:
        raise UserError("optimizer", "a transformation that looks at all parameters together", _ACCEPTED) from error
    traced_update(per_layer(optimizer, stack), rest | {name: stack.parts.params[name] for name in stack.own})
    for index, update in enumerate(others, start=1):
        if not same_update(first, update):
            raise UserError("optimizer", f"a transformation that treats layers 0 and {index} differently", _ACCEPTED)


def unstack_params(stack: Stack, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under the layers' own names, of stacked ones a `LayerSlice`; nothing is copied."""
    own: dict[str, Any] = {}
    for name, value in params.items():
        layers = stack.own.get(name)
        own |= {name: value} if layers is None else {layer: layer_of(value, i) for i, layer in enumerate(layers)}
    return own


def unstack_state(optimizer: optax.GradientTransformation, stack: Stack, state: Any) -> Any:
    """The state of `per_layer` as the optimizer's own, under the layers' names; see `unstack_params`."""
    if not stack.own:
        return state
    known = {own: (name, i) for name, layers in stack.own.items() for i, own in enumerate(layers)}
    leaves = dict(tree_leaves_with_path(state))

    def find(path: Any, _: Any) -> Any:
        own = owner(path, known)
        if own is None:
            return leaves[path]
        name, layer = known[own]
        return layer_of(leaves[_renamed(path, own, name)], layer)

    return tree_map_with_path(find, jax.eval_shape(optimizer.init, stack.per_layer.trained))


def stack_state(stack: Stack, state: Any, like: Any, *, used_up: bool = False) -> Any:
    """Undo `unstack_state`; `like` is a state of `per_layer`, whose layouts the result gets.

    With `used_up` stacked arrays are taken over, and layers' arrays are deleted kind by kind, so that both forms of
    only one kind take memory.
    """
    if not stack.own:
        return state
    leaves = dict(tree_leaves_with_path(state))

    def join(path: Any, want: Any) -> Any:
        name = owner(path, stack.own)
        if name is None:
            return jax.device_put(leaves[path] if used_up else jnp.copy(leaves[path]), want.sharding)
        layers = [leaves[_renamed(path, name, own)] for own in stack.own[name]]
        if used_up and isinstance(layers[0], LayerSlice):
            return layers[0].parts[0]
        return join_layers(joined(layers), want.sharding, used_up=used_up)

    return tree_map_with_path(join, like)


def _renamed(path: Any, name: str, new: str) -> Any:
    """The path with another parameter's name in the place of `name`."""
    return tuple(DictKey(new) if isinstance(key, DictKey) and key.key == name else key for key in path)


def _is_dict(node: Any) -> bool:
    return isinstance(node, dict)


def _with_keys(tree: Any, change: Callable[[str], str | None]) -> Any:
    """Return a tree with the keys of its dicts changed; entries whose new key is None are left out."""

    def changed(node: Any) -> Any:
        if not _is_dict(node):
            return node
        return {new: _with_keys(value, change) for key, value in node.items() if (new := change(key)) is not None}

    return jax.tree.map(changed, tree, is_leaf=_is_dict)


def _union(tree: Any, second: Any) -> Any:
    """Two trees that differ in the keys of their dicts as one."""

    def both(a: Any, b: Any) -> Any:
        return {**a, **b, **{key: _union(a[key], b[key]) for key in a.keys() & b.keys()}} if _is_dict(a) else a

    return jax.tree.map(both, tree, second, is_leaf=_is_dict)
