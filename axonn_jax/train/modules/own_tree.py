"""Parameters for an optimizer in the tree that Flax gives it, in place of a dict by name: masks and labels go by it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
            self._tree.flatten_up_to(node)
        except ValueError:
            return False
        return True

    def named(self, node: Any) -> dict[str, Any]:  # noqa: D102
        values = dict(zip(self._leaves, self._tree.flatten_up_to(node), strict=True))
        return {name: value for name, value in values.items() if name in self._names}


OwnTree = StateTree | GivenTree
"""Tree of parameters, of all or of some."""


def in_own_tree(tx: optax.GradientTransformation, tree: OwnTree) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of parameters by name that calls `tx` with these in their own tree.

    The state has the structure of `tx`'s, with a dict by name in place of each tree.
    """
    tx = optax.with_extra_args_support(tx)

    def named(node: Any, given: Named) -> Any:
        def part(n: Any) -> Any:
            return {name: value for name, value in tree.named(n).items() if name in given} if tree.holds(n) else n

        return jax.tree.map(part, node, is_leaf=tree.holds)

    def init(params: Any) -> Any:
        return named(tx.init(tree.made(params, first=True)), params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def is_named(node: Any) -> bool:
            return isinstance(node, dict) and bool(node) and node.keys() <= grads.keys()

        state = jax.tree.map(lambda node: tree.made(node) if is_named(node) else node, state, is_leaf=is_named)
        params = None if params is None else tree.made(params)
        updates, after = tx.update(tree.made(grads), state, params, **extra)
        return named(updates, grads), named(after, grads)

    return optax.GradientTransformationExtraArgs(init, update)
