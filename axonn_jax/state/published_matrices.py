"""Parameters as an optimizer that looks at whole matrices has them in published models.

Ours differ in two: a table and a head may have padding, and queries, keys and values are columns of one kernel.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from axonn_jax.errors import UserError
from axonn_jax.memory.optimizer_traits import check_offload, check_update, owner
from axonn_jax.models.vocabulary import Padded, padding_of
from axonn_jax.tensor.attention import Attention
from axonn_jax.tensor.params import Params


def published_matrices(
    optimizer: optax.GradientTransformation, model: nnx.Module, trained: Params
) -> optax.GradientTransformation:
    """Return an optimizer that has the matrices of published models, and its state in the form of ours.

    Args:
        optimizer: The user's optimizer of `trained`.
        model: The model, of which parameters may be shapes alone.
        trained: The parameters that are trained, by name; shapes are enough.

    Raises:
        UserError: Muon with masks, labels or state that know queries, keys and values as one kernel alone.
    """
    return _split_heads(_unpadded(optimizer, trained, padding_of(model)), _heads_of(model), trained)


def _unpadded(
    optimizer: optax.GradientTransformation, trained: Params, padding: Mapping[str, Padded]
) -> optax.GradientTransformation:
    """Return an optimizer to which table and head have no padding, so that norms and means are the same on every grid.

    One that treats every element by itself needs none of that. State as large as its parameter stays padded as that is.
    """
    padded = {name: trained[name] for name in padding if name in trained}
    with suppress(Exception):  # of a stranger's code, or it looks at all parameters together
        if not padded or check_offload(optimizer, "a padded vocabulary", padded):
            return optimizer
    tx = optax.with_extra_args_support(optimizer)

    def fitted(tree: Any, like: Params, *, grows: bool = False) -> Any:
        """Return a tree of parameters or state with the true vocabulary, or where it `grows` sizes of `like`."""

        def fit(path: Any, leaf: Any) -> Any:
            if (name := owner(path, padded)) is None:
                return leaf
            whole, (dim, _, used) = like[name].shape, padding[name]
            true = (*whole[:dim], min(used, whole[dim]), *whole[dim + 1 :])
            have, want = (true, whole) if grows else (whole, true)
            if leaf.shape != have:
                return leaf
            used_part = leaf[tuple(map(slice, want))]
            return jnp.pad(used_part, [(0, to - size) for size, to in zip(used_part.shape, want, strict=True)])

        return jax.tree_util.tree_map_with_path(fit, tree)

    def init(params: Any) -> Any:
        return fitted(tx.init(fitted(params, params)), params, grows=True)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(*(fitted(tree, grads) for tree in (grads, state, params)), **extra)
        return fitted(updates, grads, grows=True), fitted(state, grads, grows=True)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


class _Heads(NamedTuple):
    """Columns of a kernel of queries, keys and values: for each head of keys its queries, its key and its value."""

    group: int
    """Heads of queries for a head of keys."""
    head_dim: int
    names: tuple[str, str, str]
    """Names of the three matrices; they begin and end as the kernel's does, for the sake of a user's labels."""

    def fits(self, kernel: Any) -> bool:
        """Return False for an array of another shape, such as small ones on which an optimizer's traits are read."""
        return bool(kernel.shape[-1] % ((self.group + 2) * self.head_dim) == 0)

    def split(self, kernel: Any) -> list[Any]:
        """Return the three matrices of a kernel, or three times what masks it."""
        if isinstance(kernel, optax.MaskedNode):
            return [kernel] * 3
        rows = len(kernel)
        heads = kernel.reshape(rows, -1, self.group + 2, self.head_dim)
        return [part.reshape(rows, -1) for part in jnp.split(heads, (self.group, self.group + 1), axis=2)]

    def join(self, matrices: list[Any]) -> Any:
        """Return the kernel of three matrices, or what masks them all."""
        if isinstance(matrices[0], optax.MaskedNode):
            return matrices[0]
        rows, width = matrices[1].shape
        heads = [matrix.reshape(rows, width // self.head_dim, -1, self.head_dim) for matrix in matrices]
        return jnp.concatenate(heads, axis=2).reshape(rows, -1)


def _heads_of(model: nnx.Module) -> dict[str, _Heads]:
    """Return the heads of each kernel of queries, keys and values, by its name."""
    heads = {}
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, Attention):
            layer_name = ".".join(map(str, (*path, "qkv")))
            query, key, value = (f"{layer_name}.{matrix}.kernel" for matrix in ("query", "key", "value"))
            heads[f"{layer_name}.kernel"] = _Heads(layer.group, layer.head_dim, (query, key, value))
    return heads


def _split_heads(
    optimizer: optax.GradientTransformation, kernels: Mapping[str, _Heads], trained: Params
) -> optax.GradientTransformation:
    """Return a Muon to which queries, keys and values are matrices of their own, as its authors train them.

    Any other optimizer comes back as it is: of sums of rows and columns, as Adafactor keeps, no kernel's can be made.
    """
    if not kernels.keys() & trained.keys() or not _is_muon(optimizer, trained):
        return optimizer
    tx = optax.with_extra_args_support(optimizer)

    def split(fused: Mapping[str, _Heads], tree: Any) -> Any:
        def divided(params: dict[str, Any]) -> dict[str, Any]:
            matrices = (zip(heads.names, heads.split(params[name]), strict=True) for name, heads in fused.items())
            return {name: p for name, p in params.items() if name not in fused} | dict(chain.from_iterable(matrices))

        return _in_params(divided, fused, tree)

    def join(fused: Mapping[str, _Heads], tree: Any) -> Any:
        matrices = {matrix for heads in fused.values() for matrix in heads.names}

        def united(params: dict[str, Any]) -> dict[str, Any]:
            joined = {name: heads.join([params[matrix] for matrix in heads.names]) for name, heads in fused.items()}
            return {name: p for name, p in params.items() if name not in matrices} | joined

        return _in_params(united, matrices, tree)

    def fitting(params: Mapping[str, Any]) -> dict[str, _Heads]:
        return {name: kernels[name] for name in params if name in kernels and kernels[name].fits(params[name])}

    def init(params: Any) -> Any:
        fused = fitting(params)
        return join(fused, tx.init(split(fused, params)))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        fused = fitting(grads)
        updates, state = tx.update(*(split(fused, tree) for tree in (grads, state, params)), **extra)
        return join(fused, updates), join(fused, state)

    by_matrix = optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]
    try:
        check_update(by_matrix, trained)
    except UserError as error:
        query = next(heads.names[0] for name, heads in kernels.items() if name in trained)
        raise UserError(
            "optimizer", f"Muon beside labels, masks or state that do not take {query}",
            "one whose masks and labels are functions of the parameters that it is given, and whose state has their "
            "shapes: to Muon queries, keys and values are three matrices",
        ) from error  # fmt: skip
    return by_matrix


def _in_params(change: Callable[[dict[str, Any]], Any], names: Collection[str], tree: Any) -> Any:
    """Return a tree, parameters or state, in which a function changes each dict that has one of the names."""

    def has_names(node: Any) -> bool:
        return isinstance(node, dict) and not node.keys().isdisjoint(names)

    return jax.tree.map(lambda node: change(node) if has_names(node) else node, tree, is_leaf=has_names)


def _is_muon(optimizer: optax.GradientTransformation, trained: Params) -> bool:
    """Return True for an optimizer with Muon's state, by whatever name and beside whatever else."""
    shapes = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in trained.items()}  # arrays lie on any mesh
    state = jax.eval_shape(optimizer.init, shapes)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.contrib.MuonState))
    return any(isinstance(leaf, optax.contrib.MuonState) for leaf in leaves)
