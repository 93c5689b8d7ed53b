"""Verdict on a user's loss, traced for all rows of a batch and for the rows of one part."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.any_flax.dependence.one_row import alike
from axonn_jax.any_flax.dependence.rows import Role, Verdict, rows_verdict
from axonn_jax.any_flax.modules.batches import rows_of, with_rows
from axonn_jax.any_flax.modules.loss_model import REPLICAS
from axonn_jax.any_flax.modules.metrics import averaged, is_total
from axonn_jax.any_flax.modules.program import LossProgram
from axonn_jax.core.grid import without_mesh
from axonn_jax.core.tensor.params import Params, key_of
from axonn_jax.core.tensor.specs import is_replicated


def verdict_of(
    program: LossProgram,
    params: Params,
    carried: Params,
    batch: Any,
    rows: int,
    parts: tuple[int, int],
    *,
    training: bool,
) -> Verdict:
    """Decide whether parts of a batch's rows give the results of all rows at once.

    The loss is traced with Flax's own layers. Of parameters, state and batch only shapes and dtypes matter.

    Args:
        program: The program of the loss.
        params: Parameters by path.
        carried: State by path.
        batch: This process's rows.
        rows: Number of rows of the batch in all processes.
        parts: Number of parts that run one after the other, and of parts that run side by side.
        training: True for the loss of a training step, False for an evaluation.

    Returns:
        The verdict, for batches of this shape.

    Raises:
        Exception: Whatever the loss raises when it is traced for all rows at once.
    """
    model, count = program.model.with_flax_layers(), parts[0] * parts[1]
    weights = {name: _shape(value) for name, value in params.items()}
    state = {name: _shape(value) for name, value in carried.items()}
    replicated = [tree.value for tree in jax.tree.leaves(batch, is_leaf=is_replicated) if is_replicated(tree)]

    def run(weights: Params, state: Params, key: jax.Array, replicated: Any, rows: list[Any]) -> Any:
        values = iter(replicated)
        merged = jax.tree.map(
            lambda leaf: replace(leaf, value=next(values)) if is_replicated(leaf) else leaf,
            batch,
            is_leaf=is_replicated,
        )
        merged = with_rows(merged, rows)
        result = model.run(weights, state, key if training else None, merged, training=training, strategy="parts")
        counted = () if program.weight is None else (jnp.asarray(program.weight(merged), jnp.float32),)
        return counted, result.loss, averaged(1.0, result.aux), result.carried if training else {}

    def traced(rows: int) -> Any:
        shapes = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in rows_of(batch)]
        args = (weights, state, key_of(0), jax.tree.map(_shape, replicated), shapes)
        # Bind the axis, so that statistics of all parts stay collectives in the program, where rules recognize them.
        return args, jax.make_jaxpr(run, axis_env=[(REPLICAS, 1)], return_shape=True)(*args)

    with without_mesh():  # trace the program of a single device
        args, (full, shapes) = traced(rows)
        try:
            _, (part, _) = traced(rows // count)
        except Exception as error:  # the loss may rely on the number of rows of a full batch
            return Verdict("not understood", f"the loss of the rows of a part fails: {type(error).__name__}")
    sizes = [len(jax.tree.leaves(tree)) for tree in args]
    of_rows = [False] * sum(sizes[:-1]) + [True] * sizes[-1]
    of_batch = [False] * sum(sizes[:3]) + [True] * sum(sizes[3:])
    counted, _, aux, changed = shapes
    roles: list[Role] = ["weight"] * len(counted)
    roles.append("mean")
    roles += ["total" if is_total(leaf) else "mean" for leaf in jax.tree.leaves(aux, is_leaf=is_total)]
    roles += ["state"] * len(jax.tree.leaves(changed))

    def verdict(full: Any, part: Any, sides: tuple[int, int]) -> Verdict:
        return rows_verdict(full, part, of_rows, of_batch, roles, sides, in_turn=parts[0] > 1, shared_axis=REPLICAS)

    found = verdict(full, part, (rows, rows // count))
    if found.kind == "proven" or rows // count > 1:
        return found
    # Parts of one row may only look different: decide by parts of two rows, if these are the same program.
    with without_mesh():
        try:
            (_, (double, _)), (_, (pair, _)) = traced(2 * rows), traced(2)
        except Exception:  # the loss may rely on the number of rows
            return found
    same = alike(double, full, (2 * rows, rows)) and alike(pair, part, (2, 1))
    return verdict(double, pair, (2 * rows, 2)) if same else found


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
