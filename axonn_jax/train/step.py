"""One optimizer step as a compiled program, for real arrays or for shapes alone."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.grid import Grid
from axonn_jax.memory.activations import Activations
from axonn_jax.memory.precision import FULL, Accumulate, Precision, Precisions, precisions
from axonn_jax.memory.scale import LossScale, first_scale, next_scale
from axonn_jax.memory.zero import whole_weights
from axonn_jax.models.shape import ModelShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.attention import AttentionKernel
from axonn_jax.tensor.params import Params, Parts, Specs, take_apart
from axonn_jax.train.layout import state_layout
from axonn_jax.train.program import StageProgram


class StepMetrics(TypedDict):
    """Results of a step. Without a pipeline they are still on the devices: reading one waits for the step."""

    loss: Any
    grad_norm: Any
    loss_scale: NotRequired[Any]
    """Under fp16: what the loss was multiplied by."""
    skipped: NotRequired[Any]
    """Under fp16: steps of the run so far that an overflow has skipped."""


class GradientProgram(Protocol):
    """What a step needs of the program that it takes its gradients from; `StageProgram` is the package's."""

    @property
    def parts(self) -> Parts:
        """The model taken apart."""

    @property
    def grid(self) -> Grid:
        """Where it runs."""

    @property
    def ordered(self) -> bool:
        """Whether its order of computation is the package's, for which XLA needs options."""

    def shardings(self) -> dict[str, NamedSharding]:
        """The layout of every parameter."""

    def batch_sharding(self) -> NamedSharding:
        """The layout of a step's tokens."""

    @property
    def grad_specs(self) -> Specs:
        """The layout of every gradient, and of the masters and optimizer state with it."""

    def gradients(
        self, params: Params, tokens: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Gradients (times `scale`), mean loss and the gradients' global norm of [microbatches, sequences, seq + 1]."""


class TrainState(NamedTuple):
    """All that a step changes."""

    weights: Params
    """What layers read: float32, or in the compute dtype where masters lie apart."""
    masters: Params
    """Float32 weights in the optimizer's layout; empty where `weights` are the masters."""
    optimizer: Any
    """The optax state, laid out like the masters; with offload an `OffloadState`, which has the masters too."""
    scale: LossScale | None
    """Under fp16."""


@dataclass(frozen=True)
class Step:
    """Gradients, clipping and the optimizer's update as one function on global arrays."""

    program: GradientProgram
    optimizer: optax.GradientTransformation
    clip: float = 0.0
    """Gradients are scaled down to this global norm; 0: not clipped."""
    precisions: Precisions = FULL
    bucket: int = 16_000_000
    """Elements gathered together over `data`, where masters are split over it."""

    def __call__(self, state: TrainState, tokens: jax.Array, key: jax.Array | None) -> tuple[TrainState, StepMetrics]:
        """The state after a step, and the step's loss and gradient norm.

        Collectives: the gradients'; where masters are split over `data`, the weights are gathered over it.
        """
        grads, metrics, factor, finite, scale = self.measured(state.weights, state.scale, tokens, key)
        before = (state.masters or self._as_masters(state.weights), state.optimizer)
        after = update(self.optimizer, *before, grads, factor)
        if scale is not None:
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
        masters, optimizer = after
        return TrainState(*self._apart(masters), optimizer, scale), metrics

    def measured(
        self, weights: Params, scale: LossScale | None, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[Params, StepMetrics, jax.Array, jax.Array, LossScale | None]:
        """Gradients, metrics, the gradients' factor in the update, whether they are finite, the next loss scale."""
        if scale is None:
            grads, loss, norm = self.program.gradients(weights, tokens, key)
            finite, factor = jnp.bool_(True), clip_factor(norm, self.clip)
            return grads, {"loss": loss, "grad_norm": norm}, factor, finite, None
        grads, loss, norm = self.program.gradients(weights, tokens, key, scale.factor)
        finite, factor = jnp.isfinite(norm), clip_factor(norm, self.clip) / scale.factor
        after = next_scale(scale, finite)
        metrics: StepMetrics = {
            "loss": loss, "grad_norm": norm, "loss_scale": scale.factor, "skipped": after.skipped,
        }  # fmt: skip
        return grads, metrics, factor, finite, after

    def start(self, params: Params, *, owned: bool = True) -> TrainState:
        """Float32 parameters -> the first state; they are used up where they are `owned`, and perhaps part of it."""
        shardings = self.state_shardings(params)
        scale = jax.device_put(first_scale(), self.scalar) if self.precisions.scaled else None
        if not self._split:
            state = jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(params)
            return TrainState(params, {}, state, scale)

        def made(params: Params) -> tuple[Params, Params, Any]:
            masters = self._as_masters(params)
            return *self._apart(masters), self.optimizer.init(masters)

        weights, masters, state = jax.jit(made, out_shardings=shardings[:3])(params)
        if owned:
            jax.tree.map(lambda p: p.delete(), params)
        return TrainState(weights, masters, state, scale)

    def _as_masters(self, weights: Params) -> Params:
        if not self._split:
            return weights
        return jax.tree.map(lax.with_sharding_constraint, weights, self._master_shardings(weights))

    def _apart(self, masters: Params) -> tuple[Params, Params]:
        """Masters -> weights and what is kept of masters beside them."""
        if not self._split:
            return masters, {}
        layouts = (self.program.grad_specs, self.program.parts.specs)
        weights = whole_weights(masters, layouts, self.program.grid.mesh, self.precisions.weights, self.bucket)
        return weights, masters if self.precisions.masters else {}

    @property
    def _split(self) -> bool:
        return self.precisions.masters or self.program.grad_specs != self.program.parts.specs

    def _master_shardings(self, names: Iterable[str]) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.program.grid.mesh, self.program.grad_specs[name]) for name in names}

    def state_shardings(self, params: Params) -> Any:
        """The layout of the state for such parameters, which may be shapes alone."""
        masters = self._master_shardings(params)
        state = jax.eval_shape(self.optimizer.init, params)
        optimizer = state_layout(state, params, masters, self.scalar)
        scale: Any = (self.scalar,) * 3 if self.precisions.scaled else None
        weights: Any = self.program.shardings()
        kept: Any = masters if self.precisions.masters else {}
        return TrainState(weights, kept, optimizer, scale and LossScale(*scale))

    def jitted(self, params: Params) -> Any:
        """The step under `jax.jit`, for such parameters; the state is donated to it and keeps its layout."""
        metrics = dict.fromkeys(jax.eval_shape(self._metrics), self.scalar)
        out = (self.state_shardings(params), metrics)
        return jax.jit(self.__call__, donate_argnums=0, out_shardings=out, compiler_options=self.compiler_options())

    def _metrics(self) -> StepMetrics:
        keys = ("loss", "grad_norm", *(("loss_scale", "skipped") if self.precisions.scaled else ()))
        return dict.fromkeys(keys, jnp.zeros(()))  # type: ignore[return-value]

    def compiler_options(self) -> dict[str, Any] | None:
        """What XLA needs to keep the program's order of computation."""
        platform = self.program.grid.mesh.devices.flat[0].platform
        return (compat.overlap_options(platform) if self.program.ordered else {}) or None

    def compiled(
        self, tokens: tuple[int, int, int], key: Any = None, compiler_options: dict[str, str] | None = None
    ) -> jax.stages.Compiled:
        """The step compiled for the program's parameters and [microbatches, sequences, seq + 1] tokens.

        Parameters may be shapes alone; no array is made. `key` is one, or its shape, where the model has dropout.
        """
        params = jax.tree.map(_float32, self.program.parts.params)
        shardings = self.state_shardings(params)
        state = _laid_out(jax.eval_shape(self._abstract, params), shardings)
        batch = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=self.program.batch_sharding())
        return self.jitted(params).lower(state, batch, key).compile(compiler_options)

    def _abstract(self, params: Params) -> TrainState:
        weights = {name: p.astype(self.precisions.weights) for name, p in params.items()}
        scale = first_scale() if self.precisions.scaled else None
        return TrainState(weights, params if self.precisions.masters else {}, self.optimizer.init(params), scale)

    @property
    def scalar(self) -> NamedSharding:
        """The layout of a number."""
        return NamedSharding(self.program.grid.mesh, P())


def update(
    optimizer: optax.GradientTransformation, masters: Params, state: Any, grads: Params, factor: jax.Array
) -> tuple[Params, Any]:
    """Masters and optimizer state after an update with `factor` times the gradients, in float32."""
    grads = {name: grad.astype(jnp.float32) * factor for name, grad in grads.items()}
    with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
        updates, state = optimizer.update(grads, state, masters)
    return optax.apply_updates(masters, updates), state  # type: ignore[return-value]


def clip_factor(norm: jax.Array, clip: float) -> jax.Array:
    """What brings gradients of a global norm down to `clip` (0: nothing does)."""
    # The published coefficient (AxoNN, Megatron-LM): clip / (norm + 1e-6), never above one.
    return jnp.minimum(1.0, clip / (norm + 1e-6)) if clip > 0.0 else jnp.ones_like(norm)


def _float32(param: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(param.shape, jnp.float32)


def compile_abstract(
    shape: ModelShape,
    grid: Grid,
    optimizer: optax.GradientTransformation,
    *,
    sequences: int,
    microbatches: int = 1,
    clip: float = 1.0,
    precision: Precision = "fp32",
    accumulate: Accumulate = "fp32",
    zero: bool = False,
    activations: Activations = "none",
    bucket: int = 16_000_000,
    streams: int = 1,
    ordered: bool = False,
    attention: AttentionKernel = "auto",
    compiler_options: dict[str, str] | None = None,
) -> jax.stages.Compiled:
    """The step that a `Trainer` with these settings runs on `sequences` a step, compiled without making any array.

    So a step for hundreds of virtual devices can be compiled on one machine. `attention` has to be said where the
    grid's devices are not those of the default backend, from which it is chosen otherwise. Raises ``UserError``
    where model or batch do not divide over the grid.
    """
    grid.shape.check_model(shape)
    grid.shape.check_batch(sequences, microbatches)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), attention=attention))
    zero = zero and grid.shape.data > 1
    dtypes = precisions(precision, accumulate, apart=zero)
    parts = take_apart(model)
    program = StageProgram(parts, grid, dtypes.compute, activations, bucket, streams, ordered, dtypes.sums, zero)
    rows = (microbatches, sequences // microbatches, shape.seq_len + 1)
    key = jax.eval_shape(lambda: jax.random.key(0)) if shape.dropout > 0.0 else None
    return Step(program, optimizer, clip, dtypes, bucket).compiled(rows, key, compiler_options)


def _laid_out(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings)
