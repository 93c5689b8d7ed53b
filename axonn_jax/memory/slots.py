"""What an optax state consists of: one array a parameter and slot (a moment), and numbers that all share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axonn_jax.errors import UserError

Tree = Any


@dataclass(frozen=True)
class Slots:
    """The state of a transformation taken apart: by slot and parameter, and the scalars in order."""

    arrays: dict[str, dict[str, Any]]
    """Slot (the path in the state without the parameter's name) -> parameter -> array."""
    scalars: list[Any]


def take_slots(state: Tree, params: Mapping[str, Any]) -> Slots:
    """Takes a state apart; raises ``UserError`` where a leaf is neither of a parameter's shape nor a scalar."""
    arrays: dict[str, dict[str, Any]] = {}
    scalars = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        slot, name = _name(path, params)
        if name is not None and leaf.shape == params[name].shape:
            arrays.setdefault(slot, {})[name] = leaf
        elif leaf.shape == ():
            scalars.append(leaf)
        else:
            raise UserError(
                "optimizer", f"a state {jax.tree_util.keystr(path)} of shape {leaf.shape}",
                "one whose state has the shapes of the parameters (adam, adamw, lion, sgd, chains of these)",
            )  # fmt: skip
    return Slots(arrays, scalars)


def put_slots(like: Tree, slots: Slots, params: Mapping[str, Any]) -> Tree:
    """The state of the structure of `like` (for these parameters) that has these slots and scalars."""
    scalars = iter(slots.scalars)

    def leaf(path: Any, want: Any) -> Any:
        slot, name = _name(path, params)
        return slots.arrays[slot][name] if name is not None and want.shape == params[name].shape else next(scalars)

    return jax.tree_util.tree_map_with_path(leaf, like)


def slot_dtypes(optimizer: optax.GradientTransformation, params: Mapping[str, Any]) -> dict[str, jnp.dtype]:
    """The slots of a transformation's state and their dtypes, the same for every parameter.

    Raises ``UserError`` where some parameters lack a slot that others have (`optax.masked` with a moment inside).
    """
    found = take_slots(jax.eval_shape(optimizer.init, dict(params)), params).arrays
    for slot, leaves in found.items():
        if len(leaves) < len(params):
            lacking = next(name for name in params if name not in leaves)
            raise UserError(
                "optimizer", f"a state whose {slot} leaves out {lacking}",
                "one that keeps the same for every parameter, where its state is kept on the host",
            )  # fmt: skip
    return {slot: next(iter(leaves.values())).dtype for slot, leaves in found.items()}


def _name(path: Any, params: Mapping[str, Any]) -> tuple[str, str | None]:
    keys = [key for key in path if not (isinstance(key, jax.tree_util.DictKey) and key.key in params)]
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in params]
    return jax.tree_util.keystr(tuple(keys)), names[-1] if names else None
