"""Model, loss and batch of `ax.plan` as shapes, checked before any grid is traced."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import FlaxError
from jax.tree_util import keystr
from jax.typing import ArrayLike

from axonn_jax.any_flax.modules.loss_model import check_real, is_float
from axonn_jax.any_flax.parallelize.linen import takes_key
from axonn_jax.core.errors import UserError, first_line
from axonn_jax.core.grid import without_mesh
from axonn_jax.core.tensor.params import key_of
from axonn_jax.core.tensor.specs import is_replicated, values_of

Loss = Callable[..., object]
_FOREIGN = (TypeError, ValueError, LookupError, AssertionError, FlaxError)
"""Exceptions with which a user's function rejects arguments that do not fit."""


class Batch(NamedTuple):
    """A batch as shapes."""

    shapes: object
    """Tree of shapes that the loss takes."""
    rowed: list[bool]
    """For each leaf, False if every device has the full array."""
    rows: int


def module_of(model: object) -> nnx.Module:
    """Return a model, or the model that a function builds, as shapes.

    Raises:
        UserError: It is not a Flax NNX module.
    """
    # Under a trace even a new constant is a tracer, which reveals a call inside jax.jit.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise UserError("ax.plan", "a call inside jax.jit", "a call outside of it")
    accepted = "a flax.nnx.Module, or a function that makes one; Linen models are not planned"
    name = getattr(model, "__name__", type(model).__name__)
    linen = "flax.linen.module.Module" in {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    if not isinstance(model, nnx.Module) and (linen or not callable(model)):
        raise UserError("model", name, accepted)
    try:
        # A grid of the script may have set a mesh; the plan's grids must not inherit its shardings.
        with without_mesh():
            module = nnx.eval_shape(model if not isinstance(model, nnx.Module) else lambda: model)
    except _FOREIGN as error:
        maker = "a function that makes a flax.nnx.Module and its nnx.Rngs; this one raises"
        raise UserError("model", name, f"{maker} {first_line(error)}") from error
    if not isinstance(module, nnx.Module):
        raise UserError("model", type(module).__name__, accepted)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        for value in jax.tree.leaves(variable):
            check_real(".".join(map(str, path)), value)
    return module


def trained(_: object, variable: object) -> bool:
    """Return True if a Variable is trained: it is a parameter of floating-point numbers."""
    return isinstance(variable, nnx.Param) and all(map(is_float, jax.tree.leaves(variable)))


def batch_of(batch: object) -> Batch:
    """Return a batch as shapes; raise ``UserError`` if its arrays have different numbers of rows."""

    def shape(path: tuple[object, ...], leaf: ArrayLike) -> jax.ShapeDtypeStruct:
        try:
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jax.dtypes.canonicalize_dtype(jnp.result_type(leaf)))
        except TypeError as error:
            raise UserError(f"batch{keystr(path)}", type(leaf).__name__, "an array of numbers, rows first") from error

    marked = jax.tree_util.tree_map_with_path(shape, batch)
    leaves = jax.tree.leaves(marked, is_leaf=is_replicated)
    rowed = [not is_replicated(leaf) for leaf in leaves for _ in jax.tree.leaves(leaf)]
    shapes = values_of(marked)
    leaves = jax.tree.leaves(shapes)
    counts = {leaf.shape[:1] for leaf, has in zip(leaves, rowed, strict=True) if has}
    if len(counts) != 1 or counts & {(), (0,)}:
        accepted = "arrays of the same number of rows, their first dimension; ax.replicated(array) for one without rows"
        raise UserError("batch", ", ".join(str(leaf.shape) for leaf in leaves) or "no array", accepted)
    return Batch(shapes, rowed, *counts.pop())


def check_value(module: nnx.Module, loss: Loss, batch: object) -> None:
    """Raise ``UserError`` if the loss raises for the batch or does not return a number."""
    # Checked once before any grid is traced, so that the error names the user's argument instead of a grid's trace.
    graph, state = nnx.split(module)
    try:
        with without_mesh():
            result = jax.eval_shape(lambda state, batch: value_of(loss, nnx.merge(graph, state), batch), state, batch)
    except _FOREIGN as error:
        shown = ", ".join(f"{leaf.dtype}{[*leaf.shape]}" for leaf in jax.tree.leaves(batch))
        raise UserError("batch", shown, f"a batch for the loss, which raises {first_line(error)}") from error
    if getattr(result, "shape", None) != () or not is_float(result):
        raise UserError(
            "loss",
            str(result).removeprefix("ShapeDtypeStruct"),
            "a function that returns a number, or a number and others",
        )


def value_of(loss: Loss, model: nnx.Module, batch: object) -> object:
    """Return a loss without its auxiliary values."""
    result = loss(model, batch, key_of(0)) if takes_key(loss) else loss(model, batch)
    return result[0] if isinstance(result, tuple) and len(result) == 2 else result
