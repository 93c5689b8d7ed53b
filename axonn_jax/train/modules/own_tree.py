"""Parameters for an optimizer in the tree that Flax gives it, in place of a dict by name: masks and labels go by it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

Named = Mapping[str, Any]
"""Values by a parameter's dotted path."""


class StateTree:
    """`nnx.State` of a module's parameters, as `nnx.Optimizer` gives it: of Variables to `init`, then of arrays."""

    def __init__(self, variables: Mapping[str, tuple[Sequence[Any], nnx.Variable[Any]]]):
        self._variables = variables

    def made(self, named: Named, *, first: bool = False) -> nnx.State[Any, Any]:
        """Return the tree of these values; `first` as for an optimizer's `init`."""
        leaves: Any = []
        for name, value in named.items():
            path, variable = self._variables.get(name, ((name,), nnx.Param(None)))  # else of a probe of the optimizer
            leaves.append((path, variable.replace(value) if first else value))
        return nnx.from_flat_state(leaves)

    def holds(self, node: Any) -> bool:
        """True if a node of an optax state is such a tree."""
        return isinstance(node, nnx.State)

    def named(self, node: Any) -> dict[str, Any]:
        """Return a tree's values by name; those left out by a mask are `optax.MaskedNode`."""
        return dict(_leaves(node, ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.State | dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield ".".join(path), node.get_raw_value() if isinstance(node, nnx.Variable) else node


class GivenTree:
    """Tree of a Linen model's parameters as it was handed in; other leaves, and absent ones, are `optax.MaskedNode`.

    Args:
        tree: Structure of the tree.
        leaves: Name of every leaf, in order.
        names: Names of the parameters among them.
    """

    def __init__(self, tree: Any, leaves: Sequence[str], names: frozenset[str]):
        self._tree, self._leaves, self._names = tree, leaves, names

    def made(self, named: Named, *, first: bool = False) -> Any:  # noqa: D102
        if not named.keys() <= self._names:  # of a probe of the optimizer
            return dict(named)
        return jax.tree.unflatten(self._tree, [named.get(name, optax.MaskedNode()) for name in self._leaves])

    def holds(self, node: Any) -> bool:  # noqa: D102
        if jax.tree_util.treedef_is_leaf(self._tree) or isinstance(node, jax.Array):
            return False
        try:
            values = self._tree.flatten_up_to(node)
        except ValueError:
            return False
        # Two states of a chain are a tuple as (w, b) is, and those of labels "w" and "b" a dict of the same keys.
        return not any(_is_state(part) for value in values for part in jax.tree.leaves(value, is_leaf=_is_state))

    def named(self, node: Any) -> dict[str, Any]:  # noqa: D102
        values = dict(zip(self._leaves, self._tree.flatten_up_to(node), strict=True))
        return {name: value for name, value in values.items() if name in self._names}


OwnTree = StateTree | GivenTree
"""Tree of parameters, of all or of some."""


def _is_state(node: Any) -> bool:
    """True for a transformation's state, a named tuple by optax's custom."""
    return isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, optax.MaskedNode)


class LabelKey(NamedTuple):
    """Key of an entry of `ByLabel`, which names no parameter; a checkpoint writes it as it does a dict's."""

    key: Any

    def __str__(self) -> str:
        return str(self.key)


@jax.tree_util.register_pytree_with_keys_class
class ByLabel:
    """A dict in an optimizer's state that is no tree of parameters, whatever its keys: by label, or of hyperparameters.

    So a plain dict in a state always has a parameter's name as key, also where a label is a parameter's name.
    """

    def __init__(self, values: dict[Any, Any]):
        self.values = values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[LabelKey, Any]], list[Any]]:
        """Return the values with their keys, and the labels."""
        labels = sorted(self.values)
        return [(LabelKey(label), self.values[label]) for label in labels], labels

    @classmethod
    def tree_unflatten(cls, labels: list[Any], values: Iterable[Any]) -> "ByLabel":
        """Return the node of these values."""
        return cls(dict(zip(labels, values, strict=True)))


def in_own_tree(tx: optax.GradientTransformation, tree: OwnTree) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of parameters by name that calls `tx` with these in their own tree.

    The state has the structure of `tx`'s, with a dict by name in place of each tree, and `ByLabel` of other dicts.
    """
    tx = optax.with_extra_args_support(tx)

    def named(node: Any, names: Named) -> Any:
        def by_name(node: Any) -> Any:
            if tree.holds(node):
                return {name: value for name, value in tree.named(node).items() if name in names}
            if isinstance(node, dict):
                return ByLabel({label: named(value, names) for label, value in node.items()})
            return node

        return jax.tree.map(by_name, node, is_leaf=lambda node: tree.holds(node) or isinstance(node, dict))

    def treed(node: Any) -> Any:
        """Return a state as `tx` knows it."""

        def as_given(node: Any) -> Any:
            if isinstance(node, ByLabel):
                return {label: treed(value) for label, value in node.values.items()}
            return tree.made(node) if isinstance(node, dict) else node

        return jax.tree.map(as_given, node, is_leaf=lambda node: isinstance(node, ByLabel | dict))

    def init(params: Any) -> Any:
        return named(tx.init(tree.made(params, first=True)), params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        params = None if params is None else tree.made(params)
        updates, after = tx.update(tree.made(grads), treed(state), params, **extra)
        return named(updates, grads), named(after, grads)

    return optax.GradientTransformationExtraArgs(init, update)
