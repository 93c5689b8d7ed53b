"""Checks of a user's model and loss for a pipeline, and their job; each process creates its stages' arrays alone."""

from collections.abc import Callable, Collection
from functools import partial
from inspect import isfunction
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axonn_jax.any_flax.modules.batches import TreeBatches
from axonn_jax.any_flax.modules.job import check_arguments
from axonn_jax.any_flax.modules.linen_model import LinenLossModel
from axonn_jax.any_flax.modules.loss_model import Loss, LossModel
from axonn_jax.any_flax.modules.metrics import Weight
from axonn_jax.any_flax.modules.nnx_model import NnxLossModel, array_of, leaves_of
from axonn_jax.any_flax.modules.param_tree import with_param_tree
from axonn_jax.any_flax.parallelize.api import parallelized_on
from axonn_jax.any_flax.parallelize.linen import parallelized_linen_on, unboxed
from axonn_jax.core.engines.optimizer import check_elementwise, layers_once
from axonn_jax.core.engines.step import masters
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid, without_mesh
from axonn_jax.core.memory.optimizer_traits import check_offload, check_optimizer_type, check_update
from axonn_jax.core.options import Rows
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig
from axonn_jax.core.tensor.params import Params, Specs, SplitModule, copied
from axonn_jax.core.tensor.specs import values_of
from axonn_jax.core.terminal import say
from axonn_jax.pipe.engine_state import create_params
from axonn_jax.pipe.schedule.policies import may_split, policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.staged.job import LossJob


def pipelined_loss_job(
    model: Any,
    optimizer: optax.GradientTransformation,
    grid: Grid,
    *,
    loss: Loss,
    weight: Weight | None,
    rows: Rows,
    wrt: Any,
    microbatches: int,
    memory: MemoryConfig,
    pipeline: PipelineConfig,
    prune: PruneConfig,
) -> LossJob:
    """Check a user's model, loss and optimizer, and return the job that trains them in a pipeline.

    Arguments are those of `Trainer`. Nothing is compiled, and no array created.

    Raises:
        UserError: They do not fit each other or the configuration.
    """
    check_arguments(loss, weight, rows, wrt, microbatches)
    if rows == "whole":
        raise UserError("rows", rows, "auto or parts in a pipeline, of which no stage sees all rows")
    if prune.prunes:
        raise UserError("prune.density", prune.density, "1 for a model of your own in a pipeline")
    shape = PipelineShape(grid.shape.pipe, microbatches, pipeline.virtual_stages)
    policy = policy_of(pipeline.policy, pipeline.in_flight, may_split(pipeline.split_backward, memory.activations))
    policy.check(shape)
    _, offloads, precisions = masters(memory, grid)
    compute = None if precisions.compute == jnp.float32 else precisions.compute
    make = model if isfunction(model) or isinstance(model, partial) else None
    abstract = _abstract(model, make)

    def model_on(mesh: Mesh, batch: Any) -> LossModel:
        if isinstance(abstract, nnx.Module):
            return NnxLossModel(parallelized_on(mesh, abstract), loss, wrt, compute, mesh)
        linen_loss, tree = parallelized_linen_on(mesh, loss, abstract, values_of(batch))
        return LinenLossModel(tree, linen_loss, compute, mesh)

    mesh = next(iter(grid.meshes.values()))
    is_module = isinstance(abstract, nnx.Module)
    # Linen's layers are found when a batch is there; until then, only names and shapes are needed.
    first: LossModel = model_on(mesh, None) if is_module else LinenLossModel(abstract, loss, compute, mesh)
    if not is_module and wrt is not nnx.Param:
        raise UserError("wrt", wrt, "nnx.Param with a tree of parameters")
    if not first.params:
        raise UserError("model", type(abstract).__name__, "one with parameters, arrays of floating-point numbers")
    if grid.rank == 0:
        for dtype in sorted({str(first.dtypes[name]) for name in first.params} - {"float32"}):
            say(f"model: parameters of {dtype} are updated in float32, and rounded where the loss reads them")
    shapes: Params = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in first.params.items()}  # type: ignore[misc]
    check_optimizer_type(optimizer)
    optimizer = with_param_tree(optimizer, first.tree)
    check_update(optimizer, shapes)
    if offloads:
        check_offload(optimizer, "memory.offload = optimizer", layers_once(shapes))
    check_elementwise(optimizer, shapes, prune)
    state = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in first.carried.items()}
    parts = SplitModule(shapes, first.specs, lambda params: first.restored(params, state))  # type: ignore[arg-type]
    values = partial(_values, make or (lambda: model))
    return LossJob(
        grid,
        optimizer,
        TreeBatches(grid, microbatches),
        parts._replace(params={n: p.update(dtype=precisions.weights) for n, p in shapes.items()}),  # type: ignore[attr-defined]
        partial(_copied if make is None else _made, values),
        owned=True,
        precisions=precisions,
        policy=policy,
        shape=shape,
        memory=memory,
        pipeline=pipeline,
        prune=prune,
        draws=first.draws,
        state=state,
        model_on=model_on,
        values=values,
        weight=weight,
        rows=rows,
    )


def _abstract(model: Any, make: Callable[[], Any] | None) -> Any:
    """Return a module, or a tree of parameters, with shapes in place of all arrays but those of random streams."""
    if make is None and isinstance(model, nnx.Module):
        graph, streams, state = nnx.split(model, nnx.RngState, ...)  # type: ignore[misc]
        return nnx.merge(graph, streams, jax.tree.map(_shape, state))
    if make is None:
        leaves = jax.tree.leaves(model)
        if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
            accepted = "a flax.nnx.Module, a tree of Linen parameters, or a function that makes one"
            raise UserError("model", model.__name__ if isinstance(model, type) else type(model).__name__, accepted)
        return jax.tree.map(_shape, unboxed(model))
    with without_mesh():  # sharding annotations in the model name the author's mesh axes, not the grid's
        abstract = nnx.eval_shape(make)
        if not isinstance(abstract, nnx.Module):
            return unboxed(abstract)
        if jax.tree.leaves(nnx.state(abstract, nnx.RngState)):
            nnx.update(abstract, jax.jit(lambda: nnx.state(make(), nnx.RngState))())
    return abstract


def _shape(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _values(make: Callable[[], Any]) -> Params:
    """Return the parameters and the state of the model that a function makes, by path."""
    model = make()
    if not isinstance(model, nnx.Module):
        leaves, _ = jax.tree_util.tree_flatten_with_path(unboxed(model))
        return {jax.tree_util.keystr(path, simple=True, separator="."): jnp.asarray(value) for path, value in leaves}
    _, _, state = nnx.split(model, nnx.RngState, ...)  # type: ignore[misc]
    return {name: array_of(name, value) for _, values in leaves_of(state) for name, value in values.items()}


def _copied(values: Callable[[], Params], specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    """Return float32 copies of the user's parameters on a mesh."""
    arrays = values()
    return {
        name: copied(jnp.asarray(arrays[name], jnp.float32), NamedSharding(mesh, spec)) for name, spec in specs.items()
    }


def _made(values: Callable[[], Params], specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    """Return the float32 parameters that a function makes, created on a mesh."""

    def make() -> Params:
        return {name: value.astype(jnp.float32) for name, value in values().items() if name in specs}

    return create_params(make, specs, mesh, shared)
