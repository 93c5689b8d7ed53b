"""An NNX script in a `Trainer`, and the same script with the same layouts left to XLA's partitioner."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compiled.common import mesh_sizes, text_of
from flax import nnx
from hlo.collectives import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.grid import Grid

VOCAB, SEQ, ROWS, MICROBATCHES = 512, 64, 32, 4
OPTIMIZER = optax.adamw(1e-3)
Batch = Mapping[str, np.ndarray]


class Block(nnx.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[rows, seq, width] -> same."""
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Language(nnx.Module):
    """A transformer of two blocks, as a script would have it."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.tokens, self.norm = nnx.Embed(VOCAB, width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(2)])
        self.head = nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """[rows, seq] -> logits."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    logits = model(batch["ids"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch_of(seed: int) -> Batch:
    """A global batch."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
    return {"ids": ids, "targets": np.roll(ids, -1, 1)}


def split(width: int, grid: Grid) -> nnx.Module:
    """The model with its layers split."""
    ids = np.zeros((ROWS // MICROBATCHES, SEQ), np.int32)
    model: nnx.Module = ax.parallelize(Language(width, nnx.Rngs(0)), grid, call=lambda model: model(ids))
    return model


class Automatic:
    """Steps of the plain model, with parameters laid out as the split model's; XLA does the rest."""

    def __init__(self, width: int, grid: Grid):
        model = Language(width, nnx.Rngs(0))
        graph, state = nnx.split(model)
        variables = dict(nnx.to_flat_state(state))
        layouts = {path: var.get_value().sharding for path, var in nnx.to_flat_state(nnx.state(split(width, grid)))}
        self._grid = grid
        self.params = {path: _placed(np.asarray(var.get_value()), layouts[path]) for path, var in variables.items()}
        everywhere = NamedSharding(grid.mesh, P())
        moments = OPTIMIZER.init(self.params)
        self.state = jax.tree.map(lambda a: a if a.ndim else _placed(np.asarray(a), everywhere), moments)

        def merged(params: Any) -> nnx.Module:
            pairs = [(path, variables[path].replace(value)) for path, value in params.items()]
            return nnx.merge(graph, nnx.from_flat_state(pairs))

        def step(params: Any, state: Any, batch: Any) -> Any:
            def add(sums: Any, rows: Any) -> tuple[Any, None]:
                loss, grads = jax.value_and_grad(lambda params: loss_of(merged(params), rows))(params)
                return jax.tree.map(jnp.add, sums, (loss, grads)), None

            zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
            loss, grads = jax.tree.map(lambda sum_: sum_ / MICROBATCHES, jax.lax.scan(add, zeros, batch)[0])
            updates, state = OPTIMIZER.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        kept = (*jax.tree.map(lambda array: array.sharding, (self.params, self.state)), None)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=kept)
        self.program = jitted.lower(self.params, self.state, self._rows(batch_of(0)))

    def compiled(self) -> jax.stages.Compiled:
        """The step's program."""
        return self.program.compile()

    def runner(self) -> Callable[[Batch], float]:
        """A function that runs a step and waits for its loss."""
        program = self.compiled()

        def run(batch: Batch) -> float:
            self.params, self.state, loss = program(self.params, self.state, self._rows(batch))
            return float(loss)

        return run

    def _rows(self, batch: Batch) -> Any:
        sharding = NamedSharding(self._grid.mesh, P(None, ("data", "z")))
        return {name: _placed(a.reshape(MICROBATCHES, -1, SEQ), sharding) for name, a in batch.items()}


def trainer_on(width: int, grid: Grid) -> ax.Trainer:
    """The same script in a trainer."""
    return ax.Trainer(split(width, grid), OPTIMIZER, grid, loss=loss_of, microbatches=MICROBATCHES)


def sent(program: jax.stages.Compiled, grid: Grid) -> float:
    """Bytes that a device sends in a step, on a ring."""
    return float(sum(one.bytes for one in collectives(text_of(program), mesh_sizes(grid.shape))))


def _placed(value: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
