"""Verdict on a user's loss: traced for all rows of a batch and for those of one part, and read by types of rows."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.backend.dependence.rows import Role, Verdict, rows_verdict
from axonn_jax.grid import without_mesh
from axonn_jax.tensor.params import Params, key_of
from axonn_jax.tensor.specs import is_replicated
from axonn_jax.train.modules.apart import REPLICAS
from axonn_jax.train.modules.batches import rows_of, with_rows
from axonn_jax.train.modules.numbers import averaged, is_total
from axonn_jax.train.modules.program import LossProgram


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
    """Return what a program's loss says about parts of a batch's rows.

    Args:
        program: The program of the loss, of which the layers are those that Flax wrote.
        params: Parameters, of which the shapes count.
        carried: State, of which the shapes count.
        batch: This process's rows, of which the shapes count.
        rows: Rows of the batch in all processes.
        parts: Parts that run one after the other, and side by side.
        training: True for the loss of a step, False for that of an evaluation.

    Raises:
        Exception: What the loss raises when it is traced for all rows at once.
    """
    model, count = program.model.as_on_one_device(), parts[0] * parts[1]
    weights = {name: _shape(value) for name, value in params.items()}
    state = {name: _shape(value) for name, value in carried.items()}
    replicated = [each.value for each in jax.tree.leaves(batch, is_leaf=is_replicated) if is_replicated(each)]

    def run(weights: Params, state: Params, key: jax.Array, replicated: Any, rows: list[Any]) -> Any:
        given = iter(replicated)
        own = jax.tree.map(
            lambda leaf: replace(leaf, value=next(given)) if is_replicated(leaf) else leaf, batch, is_leaf=is_replicated
        )
        own = with_rows(own, rows)
        result = model.run(weights, state, key if training else None, own, training=training, way="parts")
        counted = () if program.weight is None else (jnp.asarray(program.weight(own), jnp.float32),)
        return counted, result.loss, averaged(1.0, result.aux), result.carried if training else {}

    def traced(rows: int) -> Any:
        shapes = [jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for leaf in rows_of(batch)]
        given = (weights, state, key_of(0), jax.tree.map(_shape, replicated), shapes)
        # The layers' statistics of all parts stay what they are in the program: collectives over this axis.
        return given, jax.make_jaxpr(run, axis_env=[(REPLICAS, 1)], return_shape=True)(*given)

    with without_mesh():  # as on one device
        given, (whole, shapes) = traced(rows)
        try:
            _, (part, _) = traced(rows // count)
        except Exception as error:  # of a loss that counts on the rows of a whole batch
            return Verdict("not understood", f"the loss of the rows of a part fails: {type(error).__name__}")
    sizes = [len(jax.tree.leaves(each)) for each in given]
    of_rows = [False] * sum(sizes[:-1]) + [True] * sizes[-1]
    of_batch = [False] * sum(sizes[:3]) + [True] * sum(sizes[3:])
    counted, _, aux, changed = shapes
    roles: list[Role] = ["weight"] * len(counted)
    roles.append("mean")
    roles += ["total" if is_total(leaf) else "mean" for leaf in jax.tree.leaves(aux, is_leaf=is_total)]
    roles += ["state"] * len(jax.tree.leaves(changed))
    sides = (rows, rows // count)
    return rows_verdict(whole, part, of_rows, of_batch, roles, sides, in_turn=parts[0] > 1, shared_axis=REPLICAS)


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
