"""Weights of a run, of a pretrained directory or of a live model, laid out for generation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axonn_jax.checkpoint.naming import PARAMS
from axonn_jax.checkpoint.restore import check_model, load_weights, named_checkpoint
from axonn_jax.data.tokenize import ends_of, load
from axonn_jax.distributed.host_sync import host_sync
from axonn_jax.errors import UserError
from axonn_jax.experts.layer import without_drops
from axonn_jax.grid import Grid, GridShape
from axonn_jax.inference.cpu_kernels import with_kernels_transposed
from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.load import load_into
from axonn_jax.models.huggingface.pretrained import TOKENIZER, is_pretrained, shape_of
from axonn_jax.models.huggingface.reader import Pretrained
from axonn_jax.models.transformer import Transformer
from axonn_jax.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.tensor.params import Params, SplitModule, placed, shapes_of, split_module


class Loaded(NamedTuple):
    """A model for generation: its parts with shapes in place of parameters, and these, on the grid's devices."""

    shape: ModelShape
    parts: SplitModule
    params: Params


def check_grid(grid: GridShape) -> None:
    """Raises ``UserError`` for axes over which generation does not go."""
    for axis, why in (("pipe", "the stages would wait for each other"), ("z", "z would gather every weight")):
        if getattr(grid, axis) != 1:
            accepted = f"1 in generation, where for every token {why}; grid.y splits weights and heads"
            raise UserError(f"grid.{axis}", getattr(grid, axis), accepted)


def floating(dtype: Any) -> jnp.dtype:
    """The dtype of weights and cache: by itself bfloat16 on accelerators, else float32."""
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    try:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.dtype(dtype)
    except TypeError:
        pass
    raise UserError("dtype", dtype, "float32, bfloat16 or float16")


def stops_of(model: Transformer | str | Path, vocab: int) -> tuple[int, ...]:
    """The tokens that end a text, as all files of a model's directory name them; none of a live model."""
    if isinstance(model, Transformer):
        return ()
    folder = Path(model)
    tokenizer = load(folder / TOKENIZER, "RUN_DIR") if (folder / TOKENIZER).exists() else None
    return tuple(end for end in ends_of(folder, tokenizer, "RUN_DIR") if end < vocab)


def comm_for(shape: ModelShape, grid: GridShape) -> BlockComm:
    """Heads over `y` and `x`, where they divide: with few tokens attention would be done twice along `x`."""
    wide = BlockComm(attention=True)
    return wide if grid.x > 1 and wide.fits(shape, grid) else BlockComm()


def of_model(model: Transformer, grid: Grid, dtype: Any) -> Loaded:
    """A live model's weights, cast and laid out; they may lie on any mesh, or on those of stages; no collectives."""
    check_grid(grid.shape)
    model.shape.check_grid(grid.shape)
    with jax.set_mesh(Mesh(np.empty((), object), ())):  # each array has its own
        split = split_module(fit_vocabulary(model, grid.shape))
        params = {name: value if name in split.roles else value.astype(dtype) for name, value in split.params.items()}
    return Loaded(model.shape, without_drops(shapes_of(split)), placed(params, split.specs, grid.mesh))


def load_model(model: Transformer | str | Path, grid: Grid, dtype: Any) -> Loaded:
    """A live model or one in a directory, with kernels as products of few tokens want them."""
    if isinstance(model, Transformer):
        loaded = of_model(model, grid, dtype)
    elif isinstance(model, str | Path):
        loaded = of_run(Path(model), grid, dtype)
    else:
        raise UserError("model", type(model).__name__, "a Transformer, or the path of a directory")
    if jax.default_backend() != "cpu":
        return loaded
    return Loaded(loaded.shape, *with_kernels_transposed(loaded.parts, loaded.params, grid.mesh))


def of_run(
    run: Path, grid: Grid, dtype: Any, *, shape: ModelShape | None = None, warn: Callable[[str], None] = lambda _: None
) -> Loaded:
    """The weights in a directory, each device its shards alone.

    Raises ``UserError`` where they are not those of the `shape`, which is by itself that of the directory.
    """
    check_grid(grid.shape)
    shape = shape or shape_of(run, "RUN_DIR")
    shape.check_grid(grid.shape)
    pretrained = Pretrained(run, "RUN_DIR") if is_pretrained(run) else None
    checkpoint = None if pretrained else named_checkpoint(run, host_sync(grid), warn, "checkpoint")
    if checkpoint and shape.layers > len(checkpoint.manifest.arrays):  # before all of them are traced
        accepted = f"the layers of the checkpoint, whose arrays are {len(checkpoint.manifest.arrays)}"
        raise UserError("model.layers", shape.layers, accepted)
    if checkpoint:
        check_model(checkpoint, shape, "RUN_DIR")
    comm = comm_for(shape, grid.shape)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), comm=comm))
    model = fit_vocabulary(model, grid.shape)
    parts = shapes_of(split_module(model), jnp.dtype(dtype))
    abstract = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(grid.mesh, parts.specs[name]))
        for name, p in parts.params.items()
    }
    if pretrained:
        return Loaded(shape, parts, load_into(pretrained, abstract))
    assert checkpoint is not None
    sizes = {PARAMS + name: p.shape for name, p in parts.params.items()}
    return Loaded(shape, parts, load_weights(checkpoint, abstract, without_padding(sizes, padding_of(model))))
