"""Parameters in the shapes of published models, for optimizers that look at whole matrices.

Ours differ in two ways: the embedding and the head may be padded, and queries, keys and values share one kernel.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.optimizer_traits import check_offload, check_update, owner
from axonn_jax.core.models.vocabulary import Padded, padding_of
from axonn_jax.core.tensor.attention import Attention
from axonn_jax.core.tensor.params import Params


def published_matrices(
    optimizer: optax.GradientTransformation, model: nnx.Module, trained: Params
) -> optax.GradientTransformation:
    """Return an optimizer that updates the matrices of published models and keeps its state in the shapes of ours.

    Args:
        optimizer: The user's optimizer.
        model: The model; its parameters may be abstract.
        trained: Trained parameters by name; may be abstract.

    Returns:
        The wrapped optimizer, or `optimizer` itself if it treats every element by itself and is no Muon.

    Raises:
        UserError: Muon with masks, labels or state that only accept queries, keys and values as one kernel.
    """
    return _split_heads(_unpadded(optimizer, trained, padding_of(model)), _heads_of(model), trained)


def _unpadded(
    optimizer: optax.GradientTransformation, trained: Params, padding: Mapping[str, Padded]
) -> optax.GradientTransformation:
    """Return an optimizer that sees embedding and head without padding, so norms and means are the same on every grid.

    State of a parameter's shape is padded like the parameter.
    """
    padded = {name: trained[name] for name in padding if name in trained}
    # An elementwise optimizer gains nothing from cropping. User code may raise anything here, and `check_offload`
    # refuses optimizers that look at all parameters together; both kinds are wrapped.
    with suppress(Exception):
        if not padded or check_offload(optimizer, "a padded vocabulary", padded):
            return optimizer
    tx = optax.with_extra_args_support(optimizer)

    def resized(tree: optax.Params, abstract: Params, *, grows: bool = False) -> optax.Params:
        """Crop a tree of parameters or state to the unpadded vocabulary, or if it `grows` pad it back to `abstract`."""

        def resize(path: tuple[object, ...], leaf: jax.Array) -> jax.Array:
            if (name := owner(path, padded)) is None:
                return leaf
            full, (dim, _, used) = abstract[name].shape, padding[name]
            cropped = (*full[:dim], min(used, full[dim]), *full[dim + 1 :])
            source, target = (cropped, full) if grows else (full, cropped)
            # State need not have its parameter's shape: row sums of a factored moment pass through unchanged.
            if leaf.shape != source:
                return leaf
            used_part = leaf[tuple(map(slice, target))]
            return jnp.pad(used_part, [(0, to - size) for size, to in zip(used_part.shape, target, strict=True)])

        return jax.tree_util.tree_map_with_path(resize, tree)

    def init(params: optax.Params) -> optax.OptState:
        return resized(tx.init(resized(params, params)), params, grows=True)

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = tx.update(*(resized(tree, grads) for tree in (grads, state, params)), **extra)
        return resized(updates, grads, grows=True), resized(state, grads, grows=True)

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


class _Heads(NamedTuple):
    """Column layout of a fused attention kernel: the query heads, the key and the value of each key head in turn."""

    group: int
    """Query heads per key head."""
    head_dim: int
    names: tuple[str, str, str]
    """Names of the three matrices, which keep the kernel's prefix and suffix so that a user's labels still match."""

    def fits(self, kernel: jax.Array) -> bool:
        # Probes of an optimizer's traits (`optimizer_traits`) have small shapes that do not divide into heads.
        return bool(kernel.shape[-1] % ((self.group + 2) * self.head_dim) == 0)

    def split(self, kernel: jax.Array) -> list[jax.Array]:
        if isinstance(kernel, optax.MaskedNode):
            return [kernel] * 3
        rows = len(kernel)
        grouped = kernel.reshape(rows, -1, self.group + 2, self.head_dim)
        return [part.reshape(rows, -1) for part in jnp.split(grouped, (self.group, self.group + 1), axis=2)]

    def join(self, matrices: list[jax.Array]) -> jax.Array:
        if isinstance(matrices[0], optax.MaskedNode):
            return matrices[0]
        rows, width = matrices[1].shape
        grouped = [matrix.reshape(rows, width // self.head_dim, -1, self.head_dim) for matrix in matrices]
        return jnp.concatenate(grouped, axis=2).reshape(rows, -1)


def _heads_of(model: nnx.Module) -> dict[str, _Heads]:
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
    """Return Muon with queries, keys and values as separate matrices, as its authors train them.

    Any other optimizer is returned unchanged.
    """
    # Muon only: row and column sums, as Adafactor keeps, cannot be fused back into the state of one kernel.
    if not kernels.keys() & trained.keys() or not _is_muon(optimizer, trained):
        return optimizer
    tx = optax.with_extra_args_support(optimizer)

    def split(fused: Mapping[str, _Heads], tree: optax.Params) -> optax.Params:
        def split_kernels(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
            matrices = (zip(heads.names, heads.split(params[name]), strict=True) for name, heads in fused.items())
            return {name: p for name, p in params.items() if name not in fused} | dict(chain.from_iterable(matrices))

        return _in_params(split_kernels, fused, tree)

    def join(fused: Mapping[str, _Heads], tree: optax.Params) -> optax.Params:
        matrices = {matrix for heads in fused.values() for matrix in heads.names}

        def join_matrices(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
            fused_kernels = {
                name: heads.join([params[matrix] for matrix in heads.names]) for name, heads in fused.items()
            }
            return {name: p for name, p in params.items() if name not in matrices} | fused_kernels

        return _in_params(join_matrices, matrices, tree)

    def fused_in(params: Mapping[str, jax.Array]) -> dict[str, _Heads]:
        return {name: kernels[name] for name in params if name in kernels and kernels[name].fits(params[name])}

    def init(params: optax.Params) -> optax.OptState:
        fused = fused_in(params)
        return join(fused, tx.init(split(fused, params)))

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, optax.OptState]:
        fused = fused_in(grads)
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


def _in_params(
    change: Callable[[dict[str, jax.Array]], dict[str, jax.Array]], names: Collection[str], tree: optax.Params
) -> optax.Params:
    """Apply `change` to every dict in a tree that has a key among `names`."""

    def has_names(node: object) -> bool:
        return isinstance(node, dict) and not node.keys().isdisjoint(names)

    return jax.tree.map(lambda node: change(node) if has_names(node) else node, tree, is_leaf=has_names)


def _is_muon(optimizer: optax.GradientTransformation, trained: Params) -> bool:
    # Recognize Muon by its state, since chains and partitions hide the function that built it. Trace on abstract
    # parameters: the arrays may be on different meshes.
    shapes = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in trained.items()}
    state = jax.eval_shape(optimizer.init, shapes)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.contrib.MuonState))
    return any(isinstance(leaf, optax.contrib.MuonState) for leaf in leaves)
