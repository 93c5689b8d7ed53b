"""One optimizer step as a compiled program, for real arrays or for shapes alone."""

from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.grid import Grid
from axonn_jax.memory.activations import Activations
from axonn_jax.memory.precision import Precision, compute_dtype
from axonn_jax.models.shape import ModelShape
from axonn_jax.models.stacked import Stack, stack_layers
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.attention import AttentionKernel
from axonn_jax.tensor.params import Params, Parts, take_apart
from axonn_jax.train.layerwise import layerwise
from axonn_jax.train.layout import state_layout
from axonn_jax.train.program import StageProgram


class StepMetrics(TypedDict):
    """Results of a step. Without a pipeline they are still on the devices: reading one waits for the step."""

    loss: Any
    grad_norm: Any


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

    def gradients(
        self, params: Params, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Gradients, mean loss and the gradients' global norm of [microbatches, sequences, seq + 1] tokens."""


@dataclass(frozen=True)
class Step:
    """Gradients, clipping and the optimizer's update as one function on global arrays."""

    program: GradientProgram
    optimizer: optax.GradientTransformation
    clip: float = 0.0
    """Gradients are scaled down to this global norm; 0: not clipped."""

    def __call__(
        self, params: Params, opt_state: Any, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[Params, Any, StepMetrics]:
        """New parameters and optimizer state, the step's loss and gradient norm; collectives: the gradients'."""
        grads, loss, norm = self.program.gradients(params, tokens, key)
        if self.clip > 0.0:
            # The published coefficient (AxoNN, Megatron-LM): clip / (norm + 1e-6), never above one.
            scale = jnp.minimum(1.0, self.clip / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, "grad_norm": norm}

    def state_shardings(self, params: Params) -> Any:
        """The layout of the optimizer's state for such parameters, which may be shapes alone."""
        state = jax.eval_shape(self.optimizer.init, params)
        return state_layout(state, params, self.program.shardings(), self._scalar)

    def jitted(self, state_shardings: Any) -> Any:
        """The step under `jax.jit`; parameters and optimizer state are donated to it and keep their layouts."""
        metrics = {"loss": self._scalar, "grad_norm": self._scalar}
        out = (self.program.shardings(), state_shardings, metrics)
        platform = self.program.grid.mesh.devices.flat[0].platform
        options = compat.overlap_options(platform) if self.program.ordered else {}
        return jax.jit(self.__call__, donate_argnums=(0, 1), out_shardings=out, compiler_options=options or None)

    def compiled(
        self, tokens: tuple[int, int, int], key: Any = None, compiler_options: dict[str, str] | None = None
    ) -> jax.stages.Compiled:
        """The step compiled for the program's parameters and [microbatches, sequences, seq + 1] tokens.

        Parameters may be shapes alone; no array is made. `key` is one, or its shape, where the model has dropout.
        """
        params = _laid_out(self.program.parts.params, self.program.shardings())
        state_shardings = self.state_shardings(params)
        state = _laid_out(jax.eval_shape(self.optimizer.init, params), state_shardings)
        batch = jax.ShapeDtypeStruct(tokens, jnp.int32, sharding=self.program.batch_sharding())
        return self.jitted(state_shardings).lower(params, state, batch, key).compile(compiler_options)

    @property
    def _scalar(self) -> NamedSharding:
        return NamedSharding(self.program.grid.mesh, P())


def compile_abstract(
    shape: ModelShape,
    grid: Grid,
    optimizer: optax.GradientTransformation,
    *,
    sequences: int,
    microbatches: int = 1,
    clip: float = 1.0,
    precision: Precision = "fp32",
    activations: Activations = "none",
    bucket: int = 16_000_000,
    streams: int = 1,
    ordered: bool = False,
    attention: AttentionKernel = "auto",
    scanned: bool = False,
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
    stack = stack_layers(model) if scanned else Stack(take_apart(model))
    program = StageProgram(stack.parts, grid, compute_dtype(precision), activations, bucket, streams, ordered)
    rows = (microbatches, sequences // microbatches, shape.seq_len + 1)
    key = jax.eval_shape(lambda: jax.random.key(0)) if shape.dropout > 0.0 else None
    return Step(program, layerwise(optimizer, stack), clip).compiled(rows, key, compiler_options)


def _laid_out(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, shardings)
