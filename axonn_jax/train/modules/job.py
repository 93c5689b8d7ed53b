"""Job of any Flax model and its loss, for an `SpmdEngine`."""

from functools import partial
from inspect import isfunction, signature
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from axonn_jax.adapters.layers import check_no_adapters
from axonn_jax.checkpoint.naming import shapes
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.optimizer_traits import check_offload, check_optimizer_type, check_update
from axonn_jax.memory.precision import Precisions
from axonn_jax.models.stacked import Stack, unstacked
from axonn_jax.options import Rows
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.pruned.prune import Pruner
from axonn_jax.settings import MemoryConfig
from axonn_jax.tensor.parallelize.api import modules, parallelize
from axonn_jax.tensor.parallelize.layouts import PLAN
from axonn_jax.tensor.params import SplitModule, copied, shapes_of
from axonn_jax.train.engines.spmd import Job
from axonn_jax.train.engines.step import TrainStep, masters
from axonn_jax.train.modules.apart import Apart, Loss, say_first, takes_batch
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.linen_tree import TreeApart
from axonn_jax.train.modules.nnx_module import ModuleApart
from axonn_jax.train.modules.numbers import Weight
from axonn_jax.train.modules.own_tree import in_own_tree
from axonn_jax.train.modules.program import LossProgram
from axonn_jax.train.modules.proof import ROWS, Proof
from axonn_jax.train.optimizer import check_elementwise, layers_once


def loss_job(
    model: Any,
    optimizer: optax.GradientTransformation,
    grid: Grid,
    *,
    loss: Loss,
    weight: Weight | None,
    rows: Rows,
    wrt: Any,
    microbatches: int,
    clip: float,
    memory: MemoryConfig,
    prune: PruneConfig,
) -> Job:
    """Return the job of an NNX module, or of a tree of Linen parameters, that `loss` trains; nothing is compiled.

    Raises ``UserError`` for a loss, a model or an optimizer that does not go with the others.
    """
    _check(loss, weight, rows, wrt, microbatches)
    _, offloads, dtypes = masters(memory, grid)
    compute = None if dtypes.compute == jnp.float32 else dtypes.compute
    apart: Apart
    if isfunction(model) or isinstance(model, partial):
        model = parallelize(model, grid)
    if isinstance(model, nnx.Module):
        check_no_adapters(model)
        plans = [getattr(module, PLAN) for module in modules(model).values() if hasattr(module, PLAN)]
        for plan in plans:
            if plan.mesh != grid.mesh:
                lies = f"parallelized on a mesh of {dict(plan.mesh.shape)}"
                raise UserError("model", lies, f"the grid's, {grid.shape}")
        if grid.shape.devices > 1 and not plans:
            model = parallelize(model, grid)
        apart = ModuleApart(model, loss, wrt, compute, grid.mesh)
    else:
        _check_tree(model)
        if wrt is not nnx.Param:
            raise UserError("wrt", wrt, "nnx.Param with a tree of parameters")
        apart = TreeApart(model, loss, compute, grid.mesh)
    if not apart.params:
        raise UserError("model", type(model).__name__, "one with parameters, arrays of floating-point numbers")
    for dtype in sorted({str(apart.dtypes[name]) for name in apart.params} - {"float32"}):
        say_first(f"model: parameters of {dtype} are updated in float32, and rounded where the loss reads them")
    check_optimizer_type(optimizer)
    optimizer = in_own_tree(optimizer, apart.tree)
    check_update(optimizer, apart.params)
    if offloads:
        check_offload(optimizer, "memory.offload = optimizer", layers_once(apart.params))
    check_elementwise(optimizer, apart.params, prune)
    if prune.prunes and not apart.kernels:
        accepted = "1 where no layer with a kernel is known: no nnx.Linear or the like, no loss of ax.parallelize_linen"
        raise UserError("prune.density", prune.density, accepted)
    # Steps use arrays up, the user's stay.
    params = {n: copied(value, NamedSharding(grid.mesh, apart.specs[n])) for n, value in apart.params.items()}
    carried = apart.carried
    state: Any = shapes(carried)
    parts = shapes_of(SplitModule(params, apart.specs, lambda params: apart.restored(params, state)))
    apart.params, apart.carried = parts.params, state  # no array of the model's may live as long as the engine

    def program(forms: PrunedLayout | None, dtypes: Precisions, **options: Any) -> LossProgram:
        given = {"model": apart, "weight": weight, "forms": forms, "carried": state}
        return LossProgram(parts, grid, dtypes, memory, **given, **options)

    def build(forms: PrunedLayout | None) -> tuple[Stack, LossProgram, TrainStep]:
        zero, _, dtypes = masters(memory, grid, apart=forms is not None)
        made = program(forms, dtypes, zero=zero, way=proof.way, asked=rows == "parts")
        separate = dtypes.master_weights or zero or offloads or forms is not None
        return unstacked(parts), made, TrainStep(made, optimizer, clip, separate)

    batches = TreeBatches(grid, microbatches)
    proof = Proof(rows, program(None, dtypes), batches)
    return Job(
        params,
        optimizer,
        build,
        batches,
        apart.draws,
        owned=True,
        merge=apart.restored,
        chooser=Pruner(prune, apart.kernels, apart.specs, grid.mesh) if prune.prunes else None,
        formed=not prune.later,
        carried=carried,
        row_choice=proof,
    )


def _check_tree(tree: Any) -> None:
    accepted = "a flax.nnx.Module, a function that makes one, or a tree of arrays with ax.parallelize_linen's loss"
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise UserError("model", tree.__name__ if isinstance(tree, type) else type(tree).__name__, accepted)


def check_loss(loss: Any) -> None:
    """Raise ``UserError`` for what is no loss."""
    if not callable(loss):
        raise UserError("loss", type(loss).__name__, "a function of (model, batch)")
    if isinstance(loss, nnx.Module):
        raise UserError("loss", type(loss).__name__, "a function of (model, batch), and the module as model")
    if not takes_batch(loss):
        accepted = "a function of (model, batch) or (model, batch, key)"
        raise UserError("loss", f"a function of {signature(loss)}", accepted)


def _check(loss: Any, weight: Any, rows: Any, wrt: Any, microbatches: int) -> None:
    check_loss(loss)
    try:
        nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError):
        raise UserError("wrt", wrt, "a filter of Flax's, as nnx.Param") from None
    if weight is not None and not callable(weight):
        raise UserError("weight", type(weight).__name__, "a function of a batch, as the number of its unmasked targets")
    if rows not in ROWS:
        raise UserError("rows", rows, f"one of {', '.join(ROWS)}")
    if not isinstance(microbatches, int) or microbatches < 1:
        raise UserError("microbatches", microbatches, "an integer of at least 1")
