"""Job that trains any Flax model with a user's loss in an `SpmdEngine`."""

from functools import partial
from inspect import isfunction, signature
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from axonn_jax.any_flax.modules.batches import Tree, TreeBatches
from axonn_jax.any_flax.modules.linen_model import LinenLossModel
from axonn_jax.any_flax.modules.loss_model import Loss, LossModel, say_first, takes_batch
from axonn_jax.any_flax.modules.metrics import Weight
from axonn_jax.any_flax.modules.nnx_model import NnxLossModel
from axonn_jax.any_flax.modules.param_tree import with_param_tree
from axonn_jax.any_flax.modules.program import LossProgram
from axonn_jax.any_flax.modules.proof import ROWS, Proof
from axonn_jax.any_flax.parallelize.api import modules, parallelize
from axonn_jax.any_flax.parallelize.layouts import PLAN
from axonn_jax.core.adapters.layers import check_no_adapters
from axonn_jax.core.checkpoint.naming import shapes
from axonn_jax.core.engines.optimizer import check_elementwise, layers_once
from axonn_jax.core.engines.spmd import Job
from axonn_jax.core.engines.step import TrainStep, masters
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.optimizer_traits import check_offload, check_optimizer_type, check_update
from axonn_jax.core.memory.precision import Precisions
from axonn_jax.core.models.stacked import Stack, unstacked
from axonn_jax.core.options import Rows
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.prune import Pruner
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import SplitModule, copied, shapes_of


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
) -> Job[Tree, Tree]:
    """Check a user's model, loss and optimizer, and return the job that trains them; nothing is compiled yet.

    Arguments are those of `Trainer`: a model (NNX module, function that builds one, or tree of Linen parameters), its
    optimizer, its loss of (model, batch) or (model, batch, key), and settings. Parameters are copied onto the grid.

    Raises:
        UserError: The loss, the model and the optimizer do not fit each other or the configuration.
    """
    check_arguments(loss, weight, rows, wrt, microbatches)
    _, offloads, dtypes = masters(memory, grid)
    compute = None if dtypes.compute == jnp.float32 else dtypes.compute
    loss_model: LossModel
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
        loss_model = NnxLossModel(model, loss, wrt, compute, grid.mesh)
    else:
        _check_tree(model)
        if wrt is not nnx.Param:
            raise UserError("wrt", wrt, "nnx.Param with a tree of parameters")
        loss_model = LinenLossModel(model, loss, compute, grid.mesh)
    if not loss_model.params:
        raise UserError("model", type(model).__name__, "one with parameters, arrays of floating-point numbers")
    for dtype in sorted({str(loss_model.dtypes[name]) for name in loss_model.params} - {"float32"}):
        say_first(f"model: parameters of {dtype} are updated in float32, and rounded where the loss reads them")
    check_optimizer_type(optimizer)
    optimizer = with_param_tree(optimizer, loss_model.tree)
    check_update(optimizer, loss_model.params)
    if offloads:
        check_offload(optimizer, "memory.offload = optimizer", layers_once(loss_model.params))
    check_elementwise(optimizer, loss_model.params, prune)
    if prune.prunes and not loss_model.kernels:
        accepted = "1 where no layer with a kernel is known: no nnx.Linear or the like, no loss of ax.parallelize_linen"
        raise UserError("prune.density", prune.density, accepted)
    # Training steps donate their parameters, so copy the user's arrays.
    params = {n: copied(value, NamedSharding(grid.mesh, loss_model.specs[n])) for n, value in loss_model.params.items()}
    carried = loss_model.carried
    state: Any = shapes(carried)
    parts = shapes_of(SplitModule(params, loss_model.specs, lambda params: loss_model.restored(params, state)))
    # Keep shapes only: the job outlives this function in its closures, and would hold a second copy of all arrays.
    loss_model.params, loss_model.carried = parts.params, state

    def program(forms: PrunedLayout | None, dtypes: Precisions, **options: Any) -> LossProgram:
        kwargs = {"model": loss_model, "weight": weight, "forms": forms, "carried": state}
        return LossProgram(parts, grid, dtypes, memory, **kwargs, **options)

    def build(forms: PrunedLayout | None) -> tuple[Stack, LossProgram, TrainStep[Tree]]:
        zero, _, dtypes = masters(memory, grid, separate=forms is not None)
        loss_program = program(forms, dtypes, zero=zero, strategy=proof.strategy, user_selected=rows == "parts")
        separate = dtypes.master_weights or zero or offloads or forms is not None
        return unstacked(parts), loss_program, TrainStep(loss_program, optimizer, clip, separate)

    batches = TreeBatches(grid, microbatches)
    proof = Proof(rows, program(None, dtypes), batches)
    return Job(
        params,
        optimizer,
        build,
        batches,
        loss_model.draws,
        owned=True,
        merge=loss_model.restored,
        chooser=Pruner(prune, loss_model.kernels, loss_model.specs, grid.mesh) if prune.prunes else None,
        formed=not prune.starts_dense,
        carried=carried,
        row_choice=proof,
    )


def _check_tree(tree: Any) -> None:
    accepted = "a flax.nnx.Module, a function that makes one, or a tree of arrays with ax.parallelize_linen's loss"
    leaves = jax.tree.leaves(tree)
    if not leaves or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        raise UserError("model", tree.__name__ if isinstance(tree, type) else type(tree).__name__, accepted)


def check_loss(loss: Any) -> None:
    """Check that a loss is a function that can be called with a model and a batch.

    Raises:
        UserError: It cannot.
    """
    if not callable(loss):
        raise UserError("loss", type(loss).__name__, "a function of (model, batch)")
    if isinstance(loss, nnx.Module):
        raise UserError("loss", type(loss).__name__, "a function of (model, batch), and the module as model")
    if not takes_batch(loss):
        accepted = "a function of (model, batch) or (model, batch, key)"
        raise UserError("loss", f"a function of {signature(loss)}", accepted)


def check_arguments(loss: Any, weight: Any, rows: Any, wrt: Any, microbatches: int) -> None:
    """Check the arguments of a `Trainer` with a loss that do not depend on the model.

    Raises:
        UserError: One of them cannot be used.
    """
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
