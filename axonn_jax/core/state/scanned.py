"""Optimizer and state of scanned layers, converted between stacked arrays and per-layer names.

Between steps only stacked arrays exist; users, checkpoints and optimizers see per-layer names.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, tree_leaves_with_path, tree_map_with_path

from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.host_arrays import LayerSlice, LazyArray, layer_of, materialize
from axonn_jax.core.memory.optimizer_traits import Arrays, check_separable, owner, same_update, traced_update
from axonn_jax.core.models.stacked import Stack, join_layers

_ACCEPTED = "one that updates every layer by itself and in the same way, or tensor.scan_layers = no"


def per_layer(optimizer: optax.GradientTransformation, stack: Stack) -> optax.GradientTransformation:
    """Return an optimizer for stacked parameters that treats each layer as if it were separate.

    The wrapped optimizer sees one layer, under the names of the first. Its update is traced once and mapped over the
    layers (`jax.vmap`), so transformations that depend on a parameter's dims or norm (masks by `ndim`, trust ratios,
    factored moments) give the same results as on unstacked arrays. State of a stacked parameter has a leading layer
    dim. The optimizer must pass `check_per_layer`.

    Args:
        optimizer: Optimizer for parameters under per-layer names.
        stack: Model with its layers both stacked and separate.
    """
    if not stack.layer_names:
        return optimizer
    first = {name: layers[0] for name, layers in stack.layer_names.items()}
    stacked = {layer: name for name, layer in first.items()}
    unstacked = {name for name in stack.parts.params if name not in first}

    def split(tree: optax.Params) -> tuple[optax.Params, optax.Params]:
        """Split a tree into unstacked entries, and stacked ones under the names of the first layer."""
        return (
            _with_keys(tree, lambda key: None if key in first else key),
            _with_keys(tree, lambda key: None if key in unstacked else first.get(key, key)),
        )

    def merge(unstacked: optax.OptState, layers: optax.OptState) -> optax.OptState:
        return _union(unstacked, _with_keys(layers, lambda key: stacked.get(key, key)))

    def axes(layers: Arrays) -> optax.OptState:
        # State that belongs to no parameter, such as a step count, is shared by all layers and has no layer dim.
        layer = {name: jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for name, p in layers.items()}
        state = jax.eval_shape(optimizer.init, layer)
        return tree_map_with_path(lambda path, _: None if owner(path, layers) is None else 0, state)

    def init(params: optax.Params) -> optax.OptState:
        unstacked_params, layers = split(params)
        return merge(optimizer.init(unstacked_params), jax.vmap(optimizer.init, out_axes=axes(layers))(layers))

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        (unstacked_params, layers), (grads, layers_grads), (state, layers_state) = map(split, (params, grads, state))
        state_axes = axes(layers)
        update_fn = partial(optax.with_extra_args_support(optimizer).update, **extra)
        updates, state = update_fn(grads, state, unstacked_params)
        mapped = jax.vmap(update_fn, in_axes=(0, state_axes, 0), out_axes=(0, state_axes))
        layers_updates, layers_state = mapped(layers_grads, layers_state, layers)
        return merge(updates, layers_updates), merge(state, layers_state)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def check_per_layer(optimizer: optax.GradientTransformation, stack: Stack) -> None:
    """Raise ``UserError`` where `per_layer` would differ from the optimizer on separate layers.

    A layer's update must not depend on other parameters, and must be the same computation under every layer's names.
    State outside the moments must not depend on the layer.
    """
    params = stack.per_layer.params
    layers = [list(names) for names in zip(*stack.layer_names.values(), strict=True)]
    scanned = {name for names in layers for name in names}
    unscanned = {name: p for name, p in params.items() if name not in scanned}
    pair = {name: params[name] for names in layers[:2] for name in names}
    first_update, *layer_updates = (
        traced_update(optimizer, {name: params[name] for name in names}) for names in layers
    )
    try:
        check_separable(optimizer, unscanned | pair, layers[0])
    except UserError as error:
        raise UserError("optimizer", "a transformation that looks at all parameters together", _ACCEPTED) from error
    # Trace the wrapped optimizer too, so that one it cannot drive is refused here and not in the first step.
    traced_update(
        per_layer(optimizer, stack), unscanned | {name: stack.parts.params[name] for name in stack.layer_names}
    )
    for index, update in enumerate(layer_updates, start=1):
        if not same_update(first_update, update):
            raise UserError("optimizer", f"a transformation that treats layers 0 and {index} differently", _ACCEPTED)


def unstack_params(stack: Stack, params: Mapping[str, jax.Array]) -> dict[str, jax.Array | LazyArray]:
    """Return parameters under per-layer names, stacked ones as `LayerSlice`s, without copying arrays."""
    unstacked: dict[str, jax.Array | LazyArray] = {}
    for name, value in params.items():
        layers = stack.layer_names.get(name)
        unstacked |= {name: value} if layers is None else {layer: layer_of(value, i) for i, layer in enumerate(layers)}
    return unstacked


def unstack_state(optimizer: optax.GradientTransformation, stack: Stack, state: optax.OptState) -> optax.OptState:
    """Return the state of `per_layer` in the wrapped optimizer's form, under per-layer names; see `unstack_params`."""
    if not stack.layer_names:
        return state
    locations = {
        layer_name: (name, i) for name, layers in stack.layer_names.items() for i, layer_name in enumerate(layers)
    }
    leaves = dict(tree_leaves_with_path(state))

    def leaf_of(path: tuple[object, ...], _: object) -> jax.Array | LazyArray:
        layer_name = owner(path, locations)
        if layer_name is None:
            return leaves[path]
        name, layer = locations[layer_name]
        return layer_of(leaves[_renamed(path, layer_name, name)], layer)

    return tree_map_with_path(leaf_of, jax.eval_shape(optimizer.init, stack.per_layer.trained))


def stack_state(
    stack: Stack, state: optax.OptState, abstract: optax.OptState, *, used_up: bool = False
) -> optax.OptState:
    """Invert `unstack_state`; the result has the layouts of `abstract`, a state of `per_layer`.

    With `used_up`, stacked arrays are reused, and the arrays of all layers are deleted as soon as their stack exists,
    so that at most one parameter or moment occupies memory in both forms.
    """
    if not stack.layer_names:
        return state
    leaves = dict(tree_leaves_with_path(state))

    def join(path: tuple[object, ...], target: jax.ShapeDtypeStruct) -> jax.Array:
        name = owner(path, stack.layer_names)
        if name is None:
            return jax.device_put(leaves[path] if used_up else jnp.copy(leaves[path]), target.sharding)
        layers = [leaves[_renamed(path, name, layer_name)] for layer_name in stack.layer_names[name]]
        # All slices are views of the same stacked array, so the first one's part is the result.
        if used_up and isinstance(layers[0], LayerSlice):
            return layers[0].parts[0]
        return join_layers(materialize(layers), target.sharding, used_up=used_up)

    return tree_map_with_path(join, abstract)


def _renamed(path: tuple[object, ...], name: str, new: str) -> tuple[object, ...]:
    return tuple(DictKey(new) if isinstance(key, DictKey) and key.key == name else key for key in path)


def _is_dict(node: object) -> TypeGuard[dict[str, object]]:
    return isinstance(node, dict)


def _with_keys(tree: optax.Params, change: Callable[[str], str | None]) -> optax.Params:
    """Apply `change` to the dict keys of a tree, dropping entries whose new key is None."""

    def changed(node: object) -> object:
        if not _is_dict(node):
            return node
        return {new: _with_keys(value, change) for key, value in node.items() if (new := change(key)) is not None}

    return jax.tree.map(changed, tree, is_leaf=_is_dict)


def _union(tree: optax.Params, other: optax.Params) -> optax.Params:
    """Merge two trees that differ only in the keys of their dicts."""

    def merge_node(a: object, b: Any) -> object:
        return {**a, **b, **{key: _union(a[key], b[key]) for key in a.keys() & b.keys()}} if _is_dict(a) else a

    return jax.tree.map(merge_node, tree, other, is_leaf=_is_dict)
