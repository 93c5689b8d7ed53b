"""Any optimizer that treats every parameter by itself, on the stacked parameters of layers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import DictKey, tree_map_with_path

from axonn_jax.errors import UserError
from axonn_jax.memory.elementwise import same_update, traced_update
from axonn_jax.models.stacked import Stack
from axonn_jax.train.separable import check_separable

_ACCEPTED = "one that updates every layer by itself and in the same way, or train.scan_layers = no"


class LayerwiseState(NamedTuple):
    """The state of an optimizer, in two."""

    rest: Any
    """Of the parameters that are not stacked."""
    every: Any
    """Of the stacked ones: what belongs to a parameter has the layers' dim in front."""


def layerwise(optimizer: optax.GradientTransformation, stack: Stack) -> optax.GradientTransformation:
    """The optimizer for stacked parameters: it sees one layer, under the names of the first, whatever their number.

    Its update is traced and compiled once and mapped over the layers (`jax.vmap`), so what depends on a parameter's
    dims or norm (masks by `ndim`, trust ratios, factored moments) comes out as for a layer's own array. The optimizer
    must pass `check_layerwise`.
    """
    if not stack.own:
        return optimizer
    first = {name: own[0] for name, own in stack.own.items()}
    stacked = {own: name for name, own in first.items()}

    def divide(params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        rest = {name: value for name, value in params.items() if name not in first}
        return rest, {first[name]: value for name, value in params.items() if name in first}

    def init(params: Any) -> LayerwiseState:
        rest, every = divide(params)
        made = jax.vmap(optimizer.init, out_axes=_axes(optimizer, every))(every)
        return LayerwiseState(optimizer.init(rest), _renamed(made, stacked))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, LayerwiseState]:
        (rest_grads, grads), (rest, every) = divide(grads), divide(params)
        axes = _axes(optimizer, every)
        rest_updates, rest_state = optimizer.update(rest_grads, state.rest, rest)
        mapped = jax.vmap(optimizer.update, in_axes=(0, axes, 0), out_axes=(0, axes))
        updates, every_state = mapped(grads, _renamed(state.every, first), every)
        both: Any = {**rest_updates, **_renamed(updates, stacked)}  # type: ignore[dict-item]
        return both, LayerwiseState(rest_state, _renamed(every_state, stacked))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def check_layerwise(optimizer: optax.GradientTransformation, stack: Stack, params: Mapping[str, Any]) -> None:
    """Raises ``UserError`` where `layerwise` would not do what the optimizer does with the layers' own parameters.

    `params` has the layers' own names. Found out by trying: a layer's update must not depend on other parameters,
    must be the same computation under the names of every layer, and what it keeps beside its moments must not depend
    on the layer.
    """
    if not stack.own:
        return
    layers = [list(names) for names in zip(*stack.own.values(), strict=True)]
    own = {name for names in layers for name in names}
    some = {name: p for name, p in params.items() if name not in own or name in (*layers[0], *layers[1])}
    try:
        check_separable(optimizer, some, layers[0])
        first, *others = (traced_update(optimizer, {name: params[name] for name in names}) for names in layers)
        shapes = {name: stack.parts.params[name] for name in stack.own}
        traced_update(layerwise(optimizer, stack), {**{n: p for n, p in params.items() if n not in own}, **shapes})
    except UserError as error:
        raise UserError("optimizer", "a transformation that looks at all parameters together", _ACCEPTED) from error
    except (KeyError, TypeError, ValueError) as error:  # as from a mask that has all parameters' names
        raise UserError("optimizer", "a transformation that does not take layers one by one", _ACCEPTED) from error
    for index, other in enumerate(others, start=1):
        if not same_update(first, other):
            raise UserError("optimizer", f"a transformation that treats layers 0 and {index} differently", _ACCEPTED)


def _axes(optimizer: optax.GradientTransformation, every: Mapping[str, Any]) -> Any:
    """Of the state of such parameters, 0 where it belongs to one of them and has their leading dim, else None."""
    one: Any = {name: jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for name, p in every.items()}
    state = jax.eval_shape(optimizer.init, one)
    return tree_map_with_path(lambda path, _: None if owner(path, every) is None else 0, state)


def owner(path: tuple[Any, ...], names: Any) -> str | None:
    """The parameter among `names` that a leaf of an optimizer's state belongs to."""
    return next((key.key for key in reversed(path) if isinstance(key, DictKey) and key.key in names), None)


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """A tree with the keys of its dicts renamed."""

    def rename(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {names.get(key, key): _renamed(value, names) for key, value in node.items()}

    return jax.tree.map(rename, tree, is_leaf=lambda node: isinstance(node, dict))
