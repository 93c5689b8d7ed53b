"""Adapters merged into the weights of their base, on devices."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.adapters.checksum import checksum, numbers_of, read_numbered
from axonn_jax.core.adapters.config import Columns, StoredLora, layers_of
from axonn_jax.core.adapters.layers import added
from axonn_jax.core.adapters.stored import base_of
from axonn_jax.core.checkpoint.restore import Checkpoint, load_weights, resolve_checkpoint
from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.load import load_into
from axonn_jax.files.huggingface.pretrained import is_pretrained
from axonn_jax.files.huggingface.reader import Pretrained


def merged_weights(
    checkpoint: Checkpoint,
    stored: StoredLora,
    shape: ModelShape,
    read: Mapping[str, jax.ShapeDtypeStruct],
    sizes: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
    sync: HostSync,
    base: Path | None = None,
) -> dict[str, jax.Array]:
    """Read a base and merge a checkpoint's adapters into it.

    Args:
        checkpoint: Checkpoint of the adapters.
        stored: Metadata of the adapters.
        shape: Sizes of the model.
        read: Shapes, types and layouts of the parameters to return.
        sizes: Shapes without padding of the vocabulary.
        mesh: Mesh of the parameters.
        sync: Exchange between processes, for the checksum.
        base: Directory of the base; by default the one recorded in training.

    Raises:
        UserError: The base is missing, or is not the one that the adapters were trained on.
    """
    field = "base"
    folder = base or base_of(stored, checkpoint, field)
    if is_pretrained(folder):
        read_base = partial(load_into, Pretrained(folder, field))
    else:
        read_base = partial(load_weights, resolve_checkpoint(folder, sync, lambda line: None, field), sizes=sizes)
    params, rounded = read_numbered(read_base, read)
    if checksum(numbers_of(params, rounded), params, sync) != stored.checksum:
        accepted = f"the base of the adapters in {checkpoint.path}: this one's checksum is another"
        raise UserError(field, str(folder), accepted)
    layers, replicated = list(layers_of(shape, stored.config)), NamedSharding(mesh, P())
    sizes = {name: size for layer in layers for name, size in layer.arrays.items()}
    abstract = {name: jax.ShapeDtypeStruct(size, jnp.float32, sharding=replicated) for name, size in sizes.items()}
    adapters = load_weights(checkpoint, abstract)
    for layer in layers:
        name = f"{layer.name}.kernel"
        a, b = (adapters.pop(end) for end in layer.arrays)
        static: dict[str, object] = {"sharding": params[name].sharding, "columns": tuple(layer.targets.values())}
        params[name] = _merged(params[name], a, b, np.float32(stored.config.scale), **static)
    return params


@partial(jax.jit, static_argnames=("sharding", "columns"), donate_argnums=0)
def _merged(
    kernel: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    *,
    sharding: Sharding,
    columns: tuple[Columns | None, ...],
) -> jax.Array:
    return jax.lax.with_sharding_constraint(added(kernel, a, b, scale, columns), sharding)
