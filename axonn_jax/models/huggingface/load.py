"""Loading of pretrained directories into a grid: parameters born sharded, of which a process reads its shards alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding

from axonn_jax.errors import UserError, typed_arguments
from axonn_jax.grid import Grid
from axonn_jax.models.huggingface.reader import Pretrained
from axonn_jax.models.huggingface.tensor_map import Bounds
from axonn_jax.models.transformer import Transformer
from axonn_jax.models.vocabulary import fit_vocabulary
from axonn_jax.tensor.params import split_module


def load_into(pretrained: Pretrained, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Parameters of these names in the shapes, types and layouts asked for; no collectives.

    Each shard is read once and copied to its devices; shapes may be those of a padded vocabulary.
    """
    return {name: _born(pretrained, name, want) for name, want in abstract.items()}


def _born(pretrained: Pretrained, name: str, want: jax.ShapeDtypeStruct) -> jax.Array:
    sharding: Any = want.sharding
    places_of: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(want.shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, want.shape, strict=True))
        places_of.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in places_of.items():
        value = pretrained.read(name, bounds, np.dtype(want.dtype))
        places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
        # copies: an array that is memory of numpy's cannot be donated to a step
        shards += [jax.device_put(value, place, may_alias=False) for place in places]
    return jax.make_array_from_single_device_arrays(want.shape, sharding, shards)


@typed_arguments
def from_pretrained(directory: str | Path, grid: Grid) -> Transformer:
    """Return the model in a pretrained directory, in float32 and laid out over a grid; no collectives.

    The directory is Hugging Face's (config.json and safetensors) or a converted one. Every process of the grid calls it
    and reads the parts of the files that its devices hold, nothing else; no parameter is ever whole in one of them.
    Raises ``UserError`` for a pipeline, an unreadable file and an unsupported model.
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
