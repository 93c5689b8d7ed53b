"""Optimizer step as one compiled program, for real or abstract arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.adapters.layers import with_adapters
from axonn_jax.core.backend.compiler_options import step_options, supported_options
from axonn_jax.core.backend.traits import overlaps_collectives
from axonn_jax.core.engines.on_mesh import OnMesh, Placed
from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.engines.scan_layers import LAYERS, choose_stack
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.optimizer_state import DeviceOptimizer, ModelState, clip_factor
from axonn_jax.core.memory.precision import Precisions, Scale, first_scale, next_scale, on_mesh, precisions
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.models.stacked import Stack
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.models.vocabulary import fit_vocabulary
from axonn_jax.core.options import ScanLayers
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.settings import MemoryConfig, TensorConfig
from axonn_jax.core.state.scanned import per_layer
from axonn_jax.core.tensor.params import Params, SplitModule, key_of
from axonn_jax.core.tensor.weight_gather import Weights

StepMetrics = dict[str, Any]
"""Metrics of a step by name. Without a pipeline they are device values: reading one waits for the step.

`loss`, `grad_norm`, `skipped` (steps of the run so far that changed nothing, since their loss or gradients were not
finite), `loss_scale` under fp16 (factor on the loss), and those of the model: `largest_load` (tokens of the most loaded
expert over the mean, in the worst layer with experts).
"""


class TrainState(NamedTuple):
    """State that a step changes."""

    model: ModelState
    scale: Scale
    """Loss scale, with a factor under fp16."""
    carried: Params
    """Model state that is no parameter, by name."""


@dataclass(frozen=True)
class TrainStep(Generic[Placed]):
    """Gradients, clipping and the optimizer's update as one function on global arrays."""

    program: OnMesh[Placed]
    optimizer: optax.GradientTransformation
    clip: float = 0.0
    """Largest global norm of the gradients, to which larger ones are scaled down; 0: not clipped."""
    separate: bool = False
    """True if the optimizer's weights are separate from those that layers read."""

    def __call__(
        self,
        state: TrainState,
        batch: Placed,
        key: jax.Array | None,
        frozen: Weights = {},  # noqa: B006
    ) -> tuple[TrainState, StepMetrics]:
        """Return the state after a step and the step's metrics.

        If loss or norm are not finite, weights and optimizer state stay unchanged. Collectives: those of the gradients
        (`OnMesh.results`) and of the update (`DeviceOptimizer`).
        """
        measured = self.measured({**state.model.weights, **frozen}, state.scale, state.carried, batch, key)
        loss, weights = measured.metrics["loss"], {**state.model.weights, **measured.written}
        old = state.model._replace(weights=weights)
        model = self.update.apply_update(old, measured.grads, measured.factor, loss, measured.finite)
        return TrainState(model, measured.scale, measured.carried), measured.metrics

    def measured(
        self, weights: Weights, scale: Scale, carried: Params, batch: Placed, key: jax.Array | None
    ) -> "MeasuredStep":
        """Return gradients, loss and metrics of a step, before its update."""
        grads, loss, norm, further, changed = self.program.results(weights, carried, batch, key, scale.factor)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        new_scale, factor = next_scale(scale, finite), clip_factor(norm, self.clip)
        metrics: StepMetrics = {"loss": loss, "grad_norm": norm, "skipped": new_scale.skipped, **further}
        if scale.factor is not None:
            metrics["loss_scale"], factor = scale.factor, factor / scale.factor
        # State that the call itself writes must also survive a step that is skipped.
        old: Any = {**weights, **carried}
        values = {name: jnp.where(finite, value, old[name]) for name, value in changed.items()}
        written = {name: value for name, value in values.items() if name not in carried}
        if written and self.separate:
            settings = "memory.zero, memory.offload, memory.precision or prune.density"
            accepted = f"none with {settings}, which keep float32 weights apart"
            raise UserError("model", f"a call that writes the parameter {next(iter(written))}", accepted)
        state = {name: values.get(name, value) for name, value in carried.items()}
        return MeasuredStep(grads, metrics, factor, finite, new_scale, state, written)

    @property
    def update(self) -> DeviceOptimizer:
        """The optimizer's part of the step."""
        program = self.program
        shapes, specs = program.state_shapes, program.parts.specs
        layouts = ({name: specs[name] for name in shapes}, program.grad_specs)
        mesh, forms = program.grid.mesh, program.forms
        bucket = program.memory.bucket
        return DeviceOptimizer(self.optimizer, mesh, shapes, *layouts, program.precisions, bucket, forms)

    def first_scale(self) -> Scale:
        """Return the initial loss scale and count of skipped steps."""
        return on_mesh(first_scale(scaled=self.program.precisions.scaled), self.program.grid.mesh)

    def jitted(self) -> jax.stages.Wrapped:
        """Return the step under `jax.jit`, with the state donated."""
        # Fix the output layouts: donation reuses the state's buffers, and the same program must take the next state.
        shardings = (jax.tree.map(lambda s: s.sharding, self.abstract()), self.scalar)
        options = self.compiler_options()
        return jax.jit(self.__call__, donate_argnums=0, out_shardings=shardings, compiler_options=options)

    def compiler_options(self) -> dict[str, str | bool | int] | None:
        """Return the step's XLA options that this XLA supports."""
        return supported_options(self._requested_options) or None

    def missing_options(self) -> list[str]:
        """Return the names of the step's options that this XLA does not support."""
        return sorted(self._requested_options.keys() - (self.compiler_options() or {}).keys())

    @property
    def _requested_options(self) -> dict[str, object]:
        platform = self.program.grid.mesh.devices.flat[0].platform
        return step_options(platform, self.program.ordered)

    def compiled(
        self,
        tokens: tuple[int, int, int],
        key: jax.Array | jax.ShapeDtypeStruct | None = None,
        compiler_options: Mapping[str, str | bool] | None = None,
    ) -> jax.stages.Compiled:
        """Compile the step for the program's parameters without allocating any array.

        Args:
            tokens: Shape [microbatches, sequences, seq + 1] of a batch.
            key: Key or abstract key, if the model has dropout.
            compiler_options: Further options for XLA.
        """
        program, mesh = self.program, self.program.grid.mesh
        batch, parts = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=program.batch_sharding()), program.parts
        frozen = {}
        for name, p in parts.frozen.items():
            dtype = p.dtype if name in parts.roles else program.precisions.compute
            frozen[name] = jax.ShapeDtypeStruct(p.shape, dtype, sharding=NamedSharding(mesh, parts.specs[name]))
        arguments = (batch, key, frozen) if frozen else (batch, key)
        return self.jitted().lower(self.abstract(), *arguments).compile(dict(compiler_options or {}) or None)

    def abstract(self) -> TrainState:
        """Return the abstract state, with layouts."""
        scale = first_scale(scaled=self.program.precisions.scaled)
        scale = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=self.scalar), scale)
        carried = {
            name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding)
            for name, v in self.program.carried.items()
        }
        return TrainState(self.update.abstract(), scale, carried)  # type: ignore[arg-type]

    @property
    def scalar(self) -> NamedSharding:
        """Sharding of a scalar."""
        return NamedSharding(self.program.grid.mesh, P())


class MeasuredStep(NamedTuple):
    """Results of a step before its update."""

    grads: Params
    """Gradients, multiplied by the loss scale."""
    metrics: StepMetrics
    factor: Any
    """Factor on the gradients in the update: clipping divided by the loss scale; None for 1."""
    finite: jax.Array
    """True if the loss and all gradients are finite."""
    scale: Scale
    """Loss scale of the next step."""
    carried: Params
    """Model state that is no parameter, after the step."""
    written: Params = {}  # noqa: RUF012
    """Parameters that the model's call has written, before the update."""


def abstract(
    shape: ModelShape,
    grid: Grid,
    sequences: int,
    microbatches: int,
    lora: LoraConfig = LoraConfig(),  # noqa: B008
    **options: Any,
) -> tuple[Transformer, tuple[tuple[int, int, int], jax.ShapeDtypeStruct | None]]:
    """Return an abstract transformer, built with `options`, and the arguments of `TrainStep.compiled` for its batch.

    Raises ``UserError`` if the model or its `sequences` per step do not divide over the grid.
    """

    def build() -> Transformer:
        model = fit_vocabulary(Transformer(shape, rngs=nnx.Rngs(0), **options), grid.shape)
        return with_adapters(model, lora, 0) if lora.adapts else model

    model = nnx.eval_shape(build)
    model.check_grid(grid.shape)
    grid.shape.check_batch(sequences, microbatches)
    key = jax.eval_shape(lambda: key_of(0)) if shape.dropout > 0.0 else None
    return model, ((microbatches, sequences // microbatches, shape.seq_len + 1), key)


def masters(memory: MemoryConfig, grid: Grid, *, separate: bool = False) -> tuple[bool, bool, Precisions]:
    """Return whether optimizer state is split over replicas, whether it is in host memory, and the dtypes of the run.

    With `separate`, masters are separate from the weights in any case.
    """
    zero, offloads = memory.zero > 0 and grid.shape.replicas > 1, memory.offload != "none"
    return (
        zero,
        offloads,
        precisions(memory.precision, memory.accumulate, separate_masters=zero or offloads or separate),
    )


def build_step(
    model: nnx.Module,
    parts: SplitModule,
    optimizer: optax.GradientTransformation,
    grid: Grid,
    clip: float,
    memory: MemoryConfig,
    tensor: TensorConfig,
    forms: PrunedLayout | None = None,
) -> tuple[Stack, StageProgram, TrainStep[jax.Array]]:
    """Return the stacking of a model's layers, the program of its gradients, and the step, without allocating arrays.

    Only the values of pruned parameters (`forms`) are trained, and `optimizer` is for parameters under per-layer names.
    Raises ``UserError`` if layers cannot be scanned as `tensor` demands.
    """
    checked = check_model(model)
    if counts := checked.counts(parts.loads):
        optimizer = counts.optimizer(optimizer)
    # The reduction over replicas only overlaps with unrolled layers, and unrolling many just for that does not pay.
    unrolled = not checked.layer_period or len(getattr(model, checked.layer_list)) < LAYERS
    communicates = max(grid.shape.z, grid.shape.y, grid.shape.x) > 1 or (grid.shape.replicas > 1 and unrolled)
    auto = communicates and overlaps_collectives(jax.default_backend())
    ordered = tensor.order == "package" or (tensor.order == "auto" and auto)
    zero, offloads, dtypes = masters(memory, grid, separate=forms is not None)
    # Buckets of offloaded state take parameters one by one, so layers cannot be stacked.
    scan: ScanLayers = "no" if offloads else tensor.scan_layers
    stack = choose_stack(model, parts, optimizer, scan, activations=memory.activations, ordered=ordered)
    program = StageProgram(
        stack.parts,
        grid,
        replace(dtypes, wide=frozenset(stack.parts.roles)),
        memory,
        zero=zero,
        ordered=ordered,
        stacked=stack.layer_names,
        forms=None if forms is None else forms.over_layers(stack.layer_names),
        sub_batches=tensor.sub_batches,
    )
    return stack, program, TrainStep(program, per_layer(optimizer, stack), clip)
