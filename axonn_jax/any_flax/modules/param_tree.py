"""Conversion of parameters by path into the tree that Flax gives an optimizer, which its masks and labels expect."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

ValuesByPath = Mapping[str, Any]
"""Values by a parameter's dotted path."""


class StateTree:
    """Conversion to the `nnx.State` that `nnx.Optimizer` uses: of Variables for `init`, of arrays for updates.

    Args:
        variables: By a parameter's dotted path, its path in the module and its Variable.
    """

    def __init__(self, variables: Mapping[str, tuple[Sequence[Any], nnx.Variable[Any]]]):
        self._variables = variables

    def build(self, by_path: ValuesByPath, *, first: bool = False) -> nnx.State[Any, Any]:
        """Return the tree of these values.

        Args:
            by_path: The values.
            first: True for the tree that an optimizer's `init` gets.
        """
        leaves: Any = []
        for name, value in by_path.items():
            path, variable = self._variables.get(
                name, ((name,), nnx.Param(None))
            )  # unknown names come from probes of the optimizer
            leaves.append((path, variable.replace(value) if first else value))
        return nnx.from_flat_state(leaves)

    def matches(self, node: Any) -> bool:
        """Return whether a node of an optax state is such a tree."""
        return isinstance(node, nnx.State)

    def by_path(self, node: Any) -> dict[str, Any]:
        """Return a tree's values by path; masked ones are `optax.MaskedNode`."""
        return dict(_leaves(node, ()))


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, nnx.State | dict):
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield ".".join(path), node.get_raw_value() if isinstance(node, nnx.Variable) else node


class LinenTree:
    """Conversion to a Linen model's tree of parameters; leaves that are absent or not trained are `optax.MaskedNode`.

    Args:
        tree: Structure of the user's tree.
        leaves: Path of every leaf, in order.
        names: Paths of the trained parameters among them.
    """

    def __init__(self, tree: Any, leaves: Sequence[str], names: frozenset[str]):
        self._tree, self._leaves, self._names = tree, leaves, names

    def build(self, by_path: ValuesByPath, *, first: bool = False) -> Any:  # noqa: D102
        if not by_path.keys() <= self._names:  # a probe of the optimizer passes arrays of its own
            return dict(by_path)
        return jax.tree.unflatten(self._tree, [by_path.get(name, optax.MaskedNode()) for name in self._leaves])

    def matches(self, node: Any) -> bool:  # noqa: D102
        if jax.tree_util.treedef_is_leaf(self._tree) or isinstance(node, jax.Array):
            return False
        try:
            values = self._tree.flatten_up_to(node)
        except ValueError:
            return False
        # A structure alone is ambiguous: the states of a chain of two form a tuple like parameters (w, b), and states
        # labeled "w" and "b" form a dict with the same keys as the parameters.
        return not any(_is_state(part) for value in values for part in jax.tree.leaves(value, is_leaf=_is_state))

    def by_path(self, node: Any) -> dict[str, Any]:  # noqa: D102
        values = dict(zip(self._leaves, self._tree.flatten_up_to(node), strict=True))
        return {name: value for name, value in values.items() if name in self._names}


ParamTree = StateTree | LinenTree
"""Conversion for one kind of model."""


def _is_state(node: Any) -> bool:
    """Return whether a node is a transformation's state, by optax's convention a NamedTuple."""
    return isinstance(node, tuple) and hasattr(node, "_fields") and not isinstance(node, optax.MaskedNode)


class LabelKey(NamedTuple):
    """Key of an entry of `ByLabel`, which is not a parameter's path; checkpoints write it like a dict key."""

    key: Any

    def __str__(self) -> str:
        return str(self.key)


@jax.tree_util.register_pytree_with_keys_class
class ByLabel:
    """A dict in an optimizer's state that is not a tree of parameters, such as one by label or of hyperparameters.

    The distinct type guarantees that the keys of a plain dict in a state are parameter paths, even if a label has the
    same name as a parameter.
    """

    def __init__(self, values: dict[Any, Any]):
        self.values = values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[LabelKey, Any]], list[Any]]:
        """Return the values with their keys, and the labels, as jax's pytree protocol requires."""
        labels = sorted(self.values)
        return [(LabelKey(label), self.values[label]) for label in labels], labels

    @classmethod
    def tree_unflatten(cls, labels: list[Any], values: Iterable[Any]) -> "ByLabel":
        """Return the node with these values."""
        return cls(dict(zip(labels, values, strict=True)))


def with_param_tree(tx: optax.GradientTransformation, tree: ParamTree) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it works on parameters by path.

    Args:
        tx: The user's optimizer, which expects Flax's tree.
        tree: Conversion to that tree.

    Returns:
        An optimizer whose state has the structure of `tx`'s, with a dict by path in place of every tree of parameters
        and a `ByLabel` in place of every other dict.
    """
    tx = optax.with_extra_args_support(tx)

    def flatten_state(node: Any, names: ValuesByPath) -> Any:
        def by_name(node: Any) -> Any:
            if tree.matches(node):
                return {name: value for name, value in tree.by_path(node).items() if name in names}
            if isinstance(node, dict):
                return ByLabel({label: flatten_state(value, names) for label, value in node.items()})
            return node

        return jax.tree.map(by_name, node, is_leaf=lambda node: tree.matches(node) or isinstance(node, dict))

    def unflatten_state(node: Any) -> Any:
        def to_user(node: Any) -> Any:
            if isinstance(node, ByLabel):
                return {label: unflatten_state(value) for label, value in node.values.items()}
            return tree.build(node) if isinstance(node, dict) else node

        return jax.tree.map(to_user, node, is_leaf=lambda node: isinstance(node, ByLabel | dict))

    def init(params: Any) -> Any:
        return flatten_state(tx.init(tree.build(params, first=True)), params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        params = None if params is None else tree.build(params)
        updates, new_state = tx.update(tree.build(grads), unflatten_state(state), params, **extra)
        return flatten_state(updates, grads), flatten_state(new_state, grads)

    return optax.GradientTransformationExtraArgs(init, update)
