"""Weights of a run, of a pretrained directory or of a live model, laid out for generation."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from axonn_jax.core.adapters.config import check_shape
from axonn_jax.core.adapters.layers import merged
from axonn_jax.core.adapters.stored import adapters_in
from axonn_jax.core.backend.traits import copies_kernels
from axonn_jax.core.checkpoint.naming import PARAMS
from axonn_jax.core.checkpoint.restore import check_model, load_weights, resolve_checkpoint
from axonn_jax.core.distributed.host_sync import host_sync
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid, GridShape, build_mesh, without_mesh
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.core.tensor.params import Params, SplitModule, shapes_of, split_module
from axonn_jax.files.adapters.merge import merged_weights
from axonn_jax.files.data.tokenize import ends_of, load
from axonn_jax.files.huggingface.load import load_into
from axonn_jax.files.huggingface.pretrained import TOKENIZER, is_pretrained, shape_of
from axonn_jax.files.huggingface.reader import Pretrained
from axonn_jax.text.inference.cpu_kernels import with_kernels_transposed


class Loaded(NamedTuple):
    """Model for generation: parts with abstract parameters, and the parameters on the grid's devices."""

    shape: ModelShape
    parts: SplitModule
    params: Params


def check_grid(grid: GridShape) -> None:
    """Check that generation supports the grid.

    Raises:
        UserError: `pipe` or `z` is not 1.
    """
    for axis, reason in (("pipe", "the stages would wait for each other"), ("z", "z would gather every weight")):
        if getattr(grid, axis) != 1:
            accepted = f"1 in generation, where for every token {reason}; grid.y splits weights and heads"
            raise UserError(f"grid.{axis}", getattr(grid, axis), accepted)


def floating(dtype: DTypeLike | None) -> jnp.dtype:
    """Return the dtype of weights and cache; by default bfloat16 on accelerators, else float32.

    Raises:
        UserError: It is not a floating-point dtype.
    """
    if dtype is None:
        dtype = precisions("auto").compute
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise UserError("dtype", dtype, "float32, bfloat16 or float16")


def stops_of(model: Transformer | str | Path, vocab: int) -> tuple[int, ...]:
    """Return the end tokens that any file of a model's directory names; none for a live model."""
    if isinstance(model, Transformer):
        return ()
    folder = Path(model)
    tokenizer = load(folder / TOKENIZER, "RUN_DIR") if (folder / TOKENIZER).exists() else None
    return ends_of(folder, tokenizer, "RUN_DIR", vocab)


def on_grid(shape: ModelShape, grid: GridShape) -> ModelShape:
    """Return the sizes with which a model generates on a grid.

    Raises:
        UserError: The sizes do not divide over the grid.
    """
    check_grid(grid)
    # With more devices along `y` than KV heads, each device gets a copy of a head, for a part of its queries.
    if grid.y > shape.kv_heads and grid.y % shape.kv_heads == shape.heads % grid.y == 0:
        shape = replace(shape, kv_heads=grid.y)
    shape.check_grid(grid)
    return shape


def grid_of_run(shape: ModelShape, grid: Grid) -> Grid:
    """Return a grid for generation on a training grid's devices.

    `z` is merged into `y`, or into `data` if heads do not divide.
    """
    trained = grid.shape
    sizes = replace(trained, z=1, y=trained.z * trained.y)
    try:
        on_grid(shape, sizes)
    except UserError:
        sizes = replace(trained, z=1, data=trained.z * trained.data)
    mesh = build_mesh(sizes, list(grid.mesh.devices.flat))
    return Grid(sizes, mesh, {0: mesh}, grid.rank, grid.size)


def _repeated(value: jax.Array, shape: ModelShape, times: int) -> jax.Array:
    """Repeat each KV head of a parameter of the projection to queries, keys and values `times` times."""
    group = shape.heads // shape.kv_heads
    by_head = value.reshape(*value.shape[:-1], shape.kv_heads, group + 2, shape.head_dim)
    queries = by_head[..., :group, :].reshape(*value.shape[:-1], -1, group // times, shape.head_dim)
    repeated = jnp.concatenate([queries, jnp.repeat(by_head[..., group:, :], times, -3)], -2)
    return repeated.reshape(*value.shape[:-1], -1)


def at_first_copies(values: np.ndarray, shape: ModelShape, kv_heads: int) -> np.ndarray:
    """Lay out values of the projection's columns for repeated heads, with 0 for all copies but the first.

    Args:
        values: Values [..., columns] of a model with `kv_heads` heads.
        shape: Sizes with repeated heads, from `on_grid`.
        kv_heads: Number of KV heads before the repetition.
    """
    lead, group = values.shape[:-1], shape.heads // kv_heads
    by_head = values.reshape(*lead, kv_heads, group + 2, shape.head_dim)
    queries = by_head[..., :group, :].reshape(*lead, shape.kv_heads, -1, shape.head_dim)
    copies = np.zeros((*lead, shape.kv_heads, 2, shape.head_dim), values.dtype)
    copies[..., :: shape.kv_heads // kv_heads, :, :] = by_head[..., group:, :]
    return np.concatenate([queries, copies], -2).reshape(*lead, -1)


class _Plan:
    """Plan of a model on a grid, with its parts and the parameters to read, in which heads are not repeated."""

    def __init__(self, shape: ModelShape, grid: Grid, dtype: DTypeLike):
        self._source_shape, self._grid, self.shape = shape, grid, on_grid(shape, grid.shape)
        # With few tokens, attention would otherwise be computed redundantly along `x`.
        comm = BlockComm(attention=True)
        comm = comm if grid.shape.x > 1 and comm.fits(self.shape, grid.shape) else BlockComm()
        model = nnx.eval_shape(lambda: Transformer(self.shape, rngs=nnx.Rngs(0), comm=comm))
        self.model = fit_vocabulary(model, grid.shape)
        self.parts = shapes_of(split_module(self.model), jnp.dtype(dtype))
        self.read = {name: self._read(name, p) for name, p in self.parts.params.items()}

    def _read(self, name: str, struct: jax.Array) -> jax.ShapeDtypeStruct:
        size, spec = struct.shape, self.parts.specs[name]
        if self._repeats(name):
            wide = (self._source_shape.heads + 2 * self._source_shape.kv_heads) * self._source_shape.head_dim
            size = (*size[:-1], wide)
            if wide % (self._grid.shape.y * self._grid.shape.x):
                spec = P(*spec[: len(size) - 1])
        return jax.ShapeDtypeStruct(size, struct.dtype, sharding=NamedSharding(self._grid.mesh, spec))

    def _repeats(self, name: str) -> bool:
        return self.shape != self._source_shape and ".attention.qkv." in name

    def loaded(self, params: Params) -> Loaded:
        """Return the model of parameters that match `read`; `params` is modified."""
        times = self.shape.kv_heads // self._source_shape.kv_heads
        for name in filter(self._repeats, params):
            sharding = NamedSharding(self._grid.mesh, self.parts.specs[name])
            repeat = jax.jit(_repeated, static_argnums=(1, 2), out_shardings=sharding)
            params[name] = repeat(params[name], self._source_shape, times)
        shapes: Any = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in params.items()}
        return Loaded(self.shape, self.parts._replace(params=shapes), params)


def of_model(model: Transformer, grid: Grid, dtype: DTypeLike) -> Loaded:
    """Return a live model's weights, from any meshes, cast and laid out on the grid; no collectives."""
    plan = _Plan(model.shape, grid, dtype)
    with without_mesh():
        live_params = split_module(fit_vocabulary(merged(model), grid.shape)).params
        params = {name: live_params[name].astype(struct.dtype) for name, struct in plan.read.items()}
    return plan.loaded(jax.device_put(params, {name: struct.sharding for name, struct in plan.read.items()}))


def load_model(model: Transformer | str | Path, grid: Grid, dtype: DTypeLike, base: str | Path | None = None) -> Loaded:
    """Load a live model or one in a directory, with kernels in the fastest layout for products of few tokens."""
    if isinstance(model, Transformer):
        loaded = of_model(model, grid, dtype)
    else:
        loaded = of_run(Path(model), grid, dtype, base=None if base is None else Path(base))
    if not copies_kernels(jax.default_backend()):
        return loaded
    return Loaded(loaded.shape, *with_kernels_transposed(loaded.parts, loaded.params, grid.mesh))


def of_run(
    run: Path,
    grid: Grid,
    dtype: DTypeLike,
    *,
    shape: ModelShape | None = None,
    base: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Loaded:
    """Read the weights in a directory; each device reads its own shards.

    Args:
        run: Directory of a run or of a Hugging Face model.
        grid: Grid to load onto.
        dtype: Dtype of the weights.
        shape: Expected sizes; by default the directory's.
        base: Directory of the adapters' base model; by default where it was in training.
        warn: Called with warnings.

    Raises:
        UserError: The weights are of another shape, or `base` is set for a run without adapters.
    """
    check_grid(grid.shape)
    shape = shape or shape_of(run, "RUN_DIR")
    on_grid(shape, grid.shape)
    pretrained = Pretrained(run, "RUN_DIR") if is_pretrained(run) else None
    checkpoint = None if pretrained else resolve_checkpoint(run, host_sync(grid), warn, "RUN_DIR")
    stored = adapters_in(checkpoint, "RUN_DIR") if checkpoint else None
    if base and not stored:
        raise UserError("base", str(base), f"left out, as {run} is a whole model")
    # Checked before all of those layers are traced.
    if checkpoint and shape.layers > len(checkpoint.manifest.arrays):
        accepted = f"the layers of the checkpoint, whose arrays are {len(checkpoint.manifest.arrays)}"
        raise UserError("model.layers", shape.layers, accepted)
    if checkpoint:
        check_model(checkpoint, shape, "RUN_DIR")
    plan = _Plan(shape, grid, dtype)
    if pretrained:
        return plan.loaded(load_into(pretrained, plan.read))
    assert checkpoint is not None
    sizes = without_padding({PARAMS + name: struct.shape for name, struct in plan.read.items()}, padding_of(plan.model))
    if stored is None:
        return plan.loaded(load_weights(checkpoint, plan.read, sizes))
    check_shape(shape, stored.config)
    return plan.loaded(merged_weights(checkpoint, stored, shape, plan.read, sizes, grid.mesh, host_sync(grid), base))
