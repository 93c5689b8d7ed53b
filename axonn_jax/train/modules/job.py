"""Job of any Flax model and its loss, for an `SpmdEngine`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding

from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.forms import Forms
from axonn_jax.memory.optimizer_traits import check_offload, check_update
from axonn_jax.models.stacked import Stack, unstacked
from axonn_jax.tensor.parallelize.api import modules, parallelize
from axonn_jax.tensor.parallelize.layouts import PLAN
from axonn_jax.tensor.params import SplitModule, copied, shapes_of
from axonn_jax.train.config import MemoryConfig, PruneConfig, TensorConfig
from axonn_jax.train.engines.spmd import Job
from axonn_jax.train.engines.step import TrainStep, masters
from axonn_jax.train.modules.apart import Apart, Loss, ModuleApart, TreeApart
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.program import ReplicaProgram, Weight


def loss_job(
    model: Any,
    optimizer: optax.GradientTransformation,
    grid: Grid,
    *,
    loss: Loss,
    weight: Weight | None,
    microbatches: int,
    clip: float,
    memory: MemoryConfig,
    tensor: TensorConfig,
    prune: PruneConfig,
) -> Job:
    """Return the job of an NNX module, or of a tree of Linen parameters, that `loss` trains; nothing is compiled.

    Raises ``UserError`` for settings that need layers in a row, and for an optimizer that does not go with the others.
    """
    _check(grid, loss, microbatches, memory, tensor, prune)
    zero, offloads, dtypes = masters(memory, grid)
    compute = None if dtypes.compute == jnp.float32 else dtypes.compute
    apart: Apart
    if isinstance(model, nnx.Module):
        if grid.shape.devices > 1 and not any(hasattr(module, PLAN) for module in modules(model).values()):
            model = parallelize(model, grid)
        apart = ModuleApart(model, loss, compute, grid.mesh)
    else:
        apart = TreeApart(model, loss, compute, grid.mesh)
    check_update(optimizer, apart.params)
    if offloads:
        check_offload(optimizer, "memory.offload = optimizer", apart.params)
    # Steps use arrays up, the user's stay.
    params = {n: copied(value, NamedSharding(grid.mesh, apart.specs[n])) for n, value in apart.params.items()}
    carried, apart.carried = apart.carried, {name: _shape(value) for name, value in apart.carried.items()}  # type: ignore[misc]
    parts = shapes_of(SplitModule(params, apart.specs, lambda params: apart.restored(params, apart.carried)))
    apart.params = parts.params

    def build(forms: Forms | None) -> tuple[Stack, ReplicaProgram, TrainStep]:
        program = ReplicaProgram(
            parts, grid, dtypes.compute, apart, weight, memory.bucket, dtypes.grad_dtype, zero, carried=apart.carried
        )
        return unstacked(parts), program, TrainStep(program, optimizer, clip, dtypes, memory.bucket)

    batches = TreeBatches(grid, microbatches)
    return Job(params, optimizer, build, batches, apart.draws, owned=True, carried=carried, merge=apart.restored)


def _shape(value: Any) -> Any:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _check(
    grid: Grid, loss: Any, microbatches: int, memory: MemoryConfig, tensor: TensorConfig, prune: PruneConfig
) -> None:
    if not callable(loss):
        raise UserError("loss", type(loss).__name__, "a function of (model, batch)")
    if grid.shape.pipe > 1:
        accepted = "1 with loss=; a list of layers in ax.models.SequenceModel runs in a pipeline"
        raise UserError("grid.pipe", grid.shape.pipe, accepted)
    if grid.shape.expert > 1:
        raise UserError("grid.expert", grid.shape.expert, "1 with loss=")
    if microbatches < 1:
        raise UserError("microbatches", microbatches, "an integer of at least 1")
    if memory.activations != "none":
        raise UserError("memory.activations", memory.activations, "none with loss=; nnx.remat recomputes a module")
    if tensor.scan_layers == "yes" or tensor.order == "package":
        raise UserError("tensor.scan_layers, tensor.order", (tensor.scan_layers, tensor.order), "auto with loss=")
    if prune.prunes:
        raise UserError("prune.density", prune.density, "1 with loss=")
