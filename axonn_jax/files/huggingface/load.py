"""Loading of pretrained directories onto a grid; each process reads only its own shards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.grid import Grid
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.models.vocabulary import fit_vocabulary
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.huggingface.reader import Pretrained
from axonn_jax.files.huggingface.tensor_map import Bounds


def load_into(pretrained: Pretrained, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Return parameters in the shapes, types and layouts of `abstract`; no collectives.

    Shapes may include the padding of a vocabulary.
    """
    return {name: _load(pretrained, name, want) for name, want in abstract.items()}


def _load(pretrained: Pretrained, name: str, want: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = want.sharding
    # Group devices by bounds, so that a replicated shard is read once and copied to all of its devices.
    places_of: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(want.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, want.shape, strict=True))
        places_of.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in places_of.items():
        value = pretrained.read(name, bounds, np.dtype(want.dtype))
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        # No aliasing: an array that shares numpy's memory cannot be donated to a training step.
        shards += [jax.device_put(value, place, may_alias=False) for place in places]
    return jax.make_array_from_single_device_arrays(want.shape, sharding, shards)


@typed_arguments
def from_pretrained(directory: str | Path, grid: Grid) -> Transformer:
    """Load the model in a pretrained directory in float32, sharded over a grid; no collectives.

    Every process of the grid calls this, and reads only the slices of the files that its devices hold.

    Args:
        directory: Directory with config.json and safetensors, Hugging Face's or a converted one.
        grid: Grid without a pipeline.

    Raises:
        UserError: The grid has a pipeline, a file cannot be read, or the model is not supported.
    """
    if grid.shape.pipe > 1:
        accepted = "1; in a pipeline, Trainer.load(directory, weights_only=True) or checkpoint.weights of a config"
        raise UserError("grid.pipe", grid.shape.pipe, accepted)
    pretrained = Pretrained(Path(directory), "directory")
    shape = pretrained.shape
    shape.check_grid(grid.shape)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    parts = split_module(fit_vocabulary(model, grid.shape))
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(grid.mesh, parts.specs[name]))
        for name, value in parts.params.items()
    }
    merged: Any = parts.merge(load_into(pretrained, abstract))
    return merged  # type: ignore[no-any-return]
