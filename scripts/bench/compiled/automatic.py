"""The same model by automatic partitioning: `jax.jit` with layouts, and XLA to place the collectives.

What the package's own program is measured against. The layers are called outside of any manual region, where they are
the plain ones (`tensor.collectives`); parameters and batch are laid out exactly as for the explicit program, and the
activations are constrained to the layouts that they have there.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from compiled.common import Constraints
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.engines.on_mesh import OnMesh, StepResults
from axonn_jax.core.engines.step import TrainStep, abstract
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.layer import MixtureOfExperts
from axonn_jax.core.experts.router import Packing
from axonn_jax.core.experts.shape import slots_of
from axonn_jax.core.grid import BATCH_AXES, Grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.memory.remat import layer_runner
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.packed import inputs_of, values_of
from axonn_jax.core.models.stacked import run_layers
from axonn_jax.core.models.transformer import Block, Transformer
from axonn_jax.core.options import Activations, AttentionKernel, Precision
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.elementwise import DropoutKey, activated
from axonn_jax.core.tensor.embedding import Embedding
from axonn_jax.core.tensor.kernel_choice import Tiles
from axonn_jax.core.tensor.linear import Linear, swapped
from axonn_jax.core.tensor.loss import cross_entropy
from axonn_jax.core.tensor.params import Params, split_module
from axonn_jax.core.tensor.weight_gather import Weights


def dense_of(weights: Weights) -> Params:
    """Return weights of which none is pruned."""
    return {name: weight for name, weight in weights.items() if isinstance(weight, jax.Array)}


@dataclass(frozen=True)
class AutomaticProgram(OnMesh[jax.Array]):
    """Gradients of a `Transformer` as XLA partitions them; takes the place of a `StageProgram` in a `TrainStep`."""

    constraints: Constraints = field(default="layers", kw_only=True)
    sub_batches = 1
    token_axes = BATCH_AXES

    def results(
        self, params: Weights, carried: Params, batch: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the mean loss over [microbatches, sequences, seq + 1] tokens, its gradients and their global norm.

        Microbatches run one after the other. Gradients are float32 in the parameters' layout. Collectives are those
        that XLA chooses. Raises ``UserError`` for a loss scale.
        """
        if scale is not None:
            raise UserError("memory.precision", "fp16", "fp32 or bf16 with automatic partitioning")
        dense = dense_of(params)
        grads, loss = self._backward(dense, batch[0], key) if batch.shape[0] == 1 else self._scan(dense, batch, key)
        grads = jax.tree.map(lax.with_sharding_constraint, grads, self.shardings())
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(grad)) for grad in grads.values()))
        return StepResults(grads, loss, norm, {})

    def evaluate(self, params: Weights, carried: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of [microbatches, sequences, seq + 1] tokens, and their targets."""
        losses = jnp.stack([self._loss(dense_of(params), tokens, None) for tokens in batch])
        return jnp.mean(losses), jnp.float32(batch[..., 1:].size)

    def _backward(self, params: Params, batch: jax.Array, key: jax.Array | None) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(self._loss)(params, batch, key)
        return grads, loss

    def _scan(self, params: Params, tokens: jax.Array, key: jax.Array | None) -> tuple[Params, jax.Array]:
        count = tokens.shape[0]

        def add(total: Any, microbatch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            index, batch = microbatch
            found = self._backward(params, batch, None if key is None else jax.random.fold_in(key, index))
            return jax.tree.map(lambda a, b: a + b / count, total, found), None

        zeros = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32))
        total, _ = lax.scan(add, zeros, (jnp.arange(count), tokens))
        return total

    def _loss(self, params: Params, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        model: Any = self.parts.merge(params)
        if self.constraints == "layers":
            self._constrain_layers(model)
        run_layer = layer_runner(model, self.memory.activations)
        dropout_key = None if key is None else DropoutKey(key)

        def constrained(x: jax.Array) -> jax.Array:
            return x if self.constraints == "none" else lax.with_sharding_constraint(x, self._rows("x"))

        def run_block(block: Block, x: jax.Array, index: jax.Array | int) -> jax.Array:
            key = None if dropout_key is None else dropout_key.of_layer(index)
            return constrained(run_layer(block, (constrained(x),), key)[0])

        # Of all logits: parts of the tokens are parts of a device's own tokens, and here there are only global arrays.
        x = values_of(model.embed(inputs_of(model, batch), self.precisions.compute, dropout_key))
        x = run_layers(model.blocks, run_block, x)
        return jnp.mean(cross_entropy(model.logits(x), batch[:, 1:]))

    def _rows(self, axis: str) -> NamedSharding:
        """[batch, seq, features] with features over `axis`."""
        return NamedSharding(self.grid.mesh, P(BATCH_AXES, None, axis))

    def _constrain_layers(self, model: Transformer) -> None:
        """Puts the model's layers, which are this trace's own, behind ones that constrain what they return."""
        for block in model.blocks:
            halves: list[tuple[Any, tuple[str, ...]]] = [(block.attention, ("qkv", "out"))]
            if isinstance(block.mlp, MixtureOfExperts):
                block.mlp = _OneHotExperts(block.mlp, self.grid.mesh)  # type: ignore[assignment]
            else:
                halves.append((block.mlp, ("gate", "up", "down")))
            for home, names in halves:
                for name in names:
                    if (layer := getattr(home, name)) is not None:
                        setattr(home, name, _Constrained(layer, self._rows(swapped(layer.in_axis))))
        logits = self._rows("y")
        model.embedding = _ConstrainedEmbedding(model.embedding, self._rows("x"), logits)  # type: ignore[assignment]
        if model.head is not None:
            model.head = _Constrained(model.head, logits)  # type: ignore[assignment]


class _Constrained(nnx.Module):
    """A linear layer whose output has a layout."""

    comm = "all_reduce"

    def __init__(self, layer: Linear, out: NamedSharding):
        self.layer, self.out = layer, out

    @property
    def kernel(self) -> Any:
        """The layer's own kernel."""
        return self.layer.kernel

    def __call__(self, x: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        return lax.with_sharding_constraint(self.layer(x, key), self.out)

    def apply_to_gathered(self, x: jax.Array, kernel: jax.Array, key: DropoutKey | None = None) -> jax.Array:
        """Apply the layer to a gathered input, as `column_parallel` asks several layers to."""
        return lax.with_sharding_constraint(self.layer.apply_to_gathered(x, kernel, key), self.out)


class _ConstrainedEmbedding(nnx.Module):
    """An embedding whose outputs, looked up and multiplied, have layouts."""

    def __init__(self, layer: Embedding, out: NamedSharding, logits: NamedSharding):
        self.layer, self.out, self.logits = layer, out, logits

    def __call__(self, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        return lax.with_sharding_constraint(self.layer(ids, dtype), self.out)

    def attend(self, h: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(self.layer.attend(h), self.logits)


_BESIDE = ("data", "z")
"""Axes that split sequences beside the experts."""


class _OneHotExperts(nnx.Module):
    """A mixture of experts as automatic partitioning is usually given one: masks and einsums, a sequence a group.

    Router and experts are those of the package's layer.
    """

    def __init__(self, layer: MixtureOfExperts, mesh: Mesh):
        self.layer, self.mesh = layer, mesh

    def __call__(self, x: jax.Array, packing: Packing | None = None) -> tuple[jax.Array, jax.Array]:
        """[batch, seq, hidden] -> what experts add, zero for choices without a slot, and no balance loss.

        Sources: Switch Transformers (arXiv 2101.03961) section 2.2, GShard (arXiv 2006.16668) algorithm 1.
        """
        layer, moe, (batch, seq, hidden) = self.layer, self.layer.moe, x.shape
        routing = layer.router(x.reshape(-1, hidden))
        count = slots_of(seq, moe.per_token, moe.experts, layer.training.slack)
        chosen = jax.nn.one_hot(routing.choices.reshape(batch, seq, -1), moe.experts, dtype=jnp.float32)
        ordered = chosen.transpose(0, 2, 1, 3).reshape(batch, -1, moe.experts)  # first choices first
        places = (jnp.cumsum(ordered, axis=1) - ordered).reshape(batch, -1, seq, moe.experts).transpose(0, 2, 1, 3)
        slots = jax.nn.one_hot(jnp.sum(places * chosen, -1).astype(jnp.int32), count, dtype=jnp.float32)
        combine = jnp.einsum(
            "bske,bskc,bsk->bsec", chosen, slots, routing.weights.reshape(batch, seq, -1), precision="highest"
        )
        combine = self._laid(combine, BATCH_AXES, None, None, None)
        dispatch = (combine > 0).astype(x.dtype)
        taken = self._laid(jnp.einsum("bsec,bsh->ebch", dispatch, x), "expert", _BESIDE, None, "x")
        experts = layer.experts
        up = self._wide(taken, experts.up.kernel.get_value())
        gate = None if experts.gate is None else self._wide(taken, experts.gate.kernel.get_value())
        out = jnp.einsum("ebcf,efh->ebch", activated(experts.activation, gate, up), experts.down.kernel.get_value())
        out = self._laid(out, "expert", _BESIDE, None, "x")
        added = jnp.einsum("bsec,ebch->bsh", combine.astype(x.dtype), out)
        return self._laid(added, BATCH_AXES, None, "x"), jnp.zeros((), jnp.float32)

    def _wide(self, taken: jax.Array, kernel: jax.Array) -> jax.Array:
        return self._laid(jnp.einsum("ebch,ehf->ebcf", taken, kernel), "expert", _BESIDE, None, "y")

    def _laid(self, x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*axes)))


def compile_automatic(
    shape: ModelShape,
    grid: Grid,
    optimizer: optax.GradientTransformation,
    *,
    sequences: int,
    microbatches: int = 1,
    clip: float = 1.0,
    precision: Precision = "fp32",
    activations: Activations = "none",
    attention: AttentionKernel | Tiles = "auto",
) -> jax.stages.Compiled:
    """As `hlo.steps.compile_abstract`, by automatic partitioning.

    Raises ``UserError`` where model or batch do not divide over the grid.
    """
    model, batch = abstract(shape, grid, sequences, microbatches, attention=attention)
    dtypes = precisions(precision)
    program = AutomaticProgram(split_module(model), grid, dtypes, MemoryConfig(activations=activations))
    return TrainStep(program, optimizer, clip).compiled(*batch)
