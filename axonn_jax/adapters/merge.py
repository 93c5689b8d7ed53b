"""Adapters merged into the weights of their base, on devices, and the checksum by which a base is known again."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from axonn_jax.adapters.config import AdaptedLayer, Columns, StoredLora, layers_of, stored_in
from axonn_jax.adapters.layers import spread
from axonn_jax.checkpoint.manifest import MANIFEST, CorruptCheckpoint
from axonn_jax.checkpoint.naming import PARAMS
from axonn_jax.checkpoint.restore import Checkpoint, load, load_weights, named_checkpoint
from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.errors import UserError
from axonn_jax.memory.host_arrays import joined
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.load import load_into
from axonn_jax.models.huggingface.pretrained import is_pretrained
from axonn_jax.models.huggingface.reader import Pretrained

_ODD = (2654435761, 2246822519, 3266489917)
"""Odd numbers that weigh an entry's place along each dim."""


def adapters_in(checkpoint: Checkpoint, field: str) -> StoredLora | None:
    """Return the facts of a checkpoint's adapters; None of a whole model's. Raises ``UserError`` for damaged ones."""
    try:
        return stored_in(checkpoint.manifest.run)
    except ValueError as error:
        raise UserError(field, str(checkpoint.path), f"a valid checkpoint; {MANIFEST}: {error}") from None


def not_whole(checkpoint: Checkpoint, field: str) -> UserError:
    """Return the refusal of a checkpoint of adapters where a whole model is wanted."""
    accepted = "a whole model, as `axonn-jax convert --merge` makes of it; this checkpoint has adapters alone"
    return UserError(field, str(checkpoint.path), accepted)


def base_of(stored: StoredLora, checkpoint: Checkpoint, field: str) -> Path:
    """Return the directory of the base of a checkpoint's adapters; raises ``UserError`` where it is not there."""
    if not stored.base or not Path(stored.base).is_dir():
        gone = f"it is no longer at {stored.base}" if stored.base else "it was given from Python"
        instead = "`axonn-jax convert --merge --base DIR` takes it from anywhere"
        raise UserError(field, str(checkpoint.path), f"adapters whose base is there; {gone}; {instead}")
    return Path(stored.base)


def merged_weights(
    checkpoint: Checkpoint,
    stored: StoredLora,
    shape: ModelShape,
    read: Mapping[str, jax.ShapeDtypeStruct],
    sizes: Mapping[str, tuple[int, ...]],
    mesh: Mesh,
    sync: HostSync,
) -> dict[str, jax.Array]:
    """Read a base and add a checkpoint's adapters to it, in the types and layouts of `read`; `sizes` are unpadded.

    Raises ``UserError`` where the base is not there, or not the one that the adapters were trained on.
    """
    field = "base"
    folder = base_of(stored, checkpoint, field)
    if is_pretrained(folder):
        params = load_into(Pretrained(folder, field), read)
    else:
        params = load_weights(named_checkpoint(folder, sync, lambda line: None, field), read, sizes)
    if checksum(params.items(), params, sync) != stored.checksum:
        accepted = f"the base of the adapters in {checkpoint.path}: it has changed since, by its checksum"
        raise UserError(field, str(folder), accepted)
    everywhere = NamedSharding(mesh, P())
    for layer in layers_of(shape, stored.config):
        name = f"{layer.name}.kernel"
        a, b = adapter_arrays(checkpoint, layer, everywhere)
        how: dict[str, Any] = {"sharding": params[name].sharding, "columns": tuple(layer.targets.values())}
        params[name] = _merged(params[name], a, b, np.float32(stored.config.scale), **how)
    return params


def adapter_arrays(checkpoint: Checkpoint, layer: AdaptedLayer, sharding: Any) -> tuple[jax.Array, jax.Array]:
    """Return A and B of a layer in a checkpoint, float32; raises ``UserError`` where they cannot be read."""
    wanted = {
        f"{PARAMS}{layer.name}.adapter.{end}": jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding)
        for end, size in layer.ends
    }
    for name, want in wanted.items():
        stored = checkpoint.manifest.arrays.get(name)
        if stored is None or stored.shape != want.shape:
            raise UserError("checkpoint", str(checkpoint.path), f"a checkpoint of adapters with {name} {want.shape}")
    try:
        a, b = load(checkpoint, wanted).values()
    except CorruptCheckpoint as fault:
        raise UserError("checkpoint", str(checkpoint.path), f"a valid checkpoint; {fault}") from None
    return a, b


@partial(jax.jit, static_argnames=("sharding", "columns"), donate_argnums=0)
def _merged(
    kernel: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    *,
    sharding: Any,
    columns: tuple[Columns | None, ...],
) -> jax.Array:
    delta = scale * jnp.dot(a, spread(b, columns, jnp), precision=jax.lax.Precision.HIGHEST)
    made = (kernel.astype(jnp.float32) + delta).astype(kernel.dtype)
    return jax.lax.with_sharding_constraint(made, sharding)


def checksum(weights: Iterable[tuple[str, Any]], names: Iterable[str], sync: HostSync) -> str:
    """Return a checksum of a base's weights rounded to bfloat16, the same on every grid and in every precision.

    Every process gives the weights that it holds, of all `names`. Collectives: an all-reduce of a number a weight;
    between processes 8 bytes a weight and process.
    """
    own = {name: int(_mixed(joined(value))) for name, value in weights}
    names = sorted(names)
    rows = sync.gathered({0: tuple(float(own.get(name, 0)) for name in names)})  # 32 bits are exact
    return _digest((name, int(max(held))) for name, held in zip(names, zip(*rows, strict=True), strict=True))


def checksum_of_files(weights: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return the same of whole weights on the host, one after another."""

    def number(value: NDArray[Any]) -> int:
        return int(_weighed(value.astype(ml_dtypes.bfloat16).view(np.uint16), np))

    return _digest(sorted((name, number(value)) for name, value in weights))


def _digest(numbers: Iterable[tuple[str, int]]) -> str:
    return hashlib.sha256("\n".join(f"{name} {number}" for name, number in numbers).encode()).hexdigest()


@jax.jit
def _mixed(array: jax.Array) -> jax.Array:
    bits: jax.Array = jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)
    return _weighed(bits, jnp)  # type: ignore[no-any-return]


def _weighed(bits: Any, numbers: ModuleType) -> Any:
    """Sum of the bits of all entries, each times an odd number by its place: zeros beyond a vocabulary add nothing."""
    place = numbers.ones((), np.uint32)
    for dim, odd in zip(range(bits.ndim), _ODD, strict=False):
        along = numbers.arange(bits.shape[dim], dtype=np.uint32) * np.uint32(odd - 1)
        place = place + along.reshape(*[1] * dim, -1, *[1] * (bits.ndim - dim - 1))
    return numbers.sum(bits.astype(np.uint32) * place, dtype=np.uint32)
