"""Flat buckets as arrays by parameter and back, on the host: what is of a device's shard stays with the device."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from axonn_jax.memory.flat import Bucket
from axonn_jax.tensor.params import Params


def joined(
    buckets: Sequence[Bucket],
    flats: Sequence[jax.Array],
    shapes: Mapping[str, tuple[int, ...]],
    shardings: Mapping[str, NamedSharding],
) -> Params:
    """One flat array a bucket -> global arrays of these shapes and layouts, by parameter."""
    parts: dict[str, dict[jax.Device, list[np.ndarray]]] = {name: {} for name in shapes}
    for bucket, flat in zip(buckets, flats, strict=True):
        for shard in flat.addressable_shards:
            row = np.asarray(shard.data)
            for span in bucket.spans:
                parts[span.name].setdefault(shard.device, []).append(row[span.at : span.at + span.size])
    return {name: _array(shapes[name], shardings[name], parts[name]) for name in shapes}


def flattened(bucket: Bucket, arrays: Params, sharding: NamedSharding) -> jax.Array:
    """Global arrays by parameter -> the flat array of a bucket."""
    rows: dict[jax.Device, list[np.ndarray]] = {}
    for span in bucket.spans:
        for shard in arrays[span.name].addressable_shards:
            rows.setdefault(shard.device, []).append(np.asarray(shard.data).reshape(-1)[span.start : span.stop])
    return _array((bucket.size * sharding.mesh.size,), sharding, rows)


def _array(shape: tuple[int, ...], sharding: NamedSharding, rows: Mapping[jax.Device, list[np.ndarray]]) -> jax.Array:
    local, kind = sharding.shard_shape(shape), sharding.memory_kind
    shards = [
        jax.device_put(np.concatenate(parts).reshape(local), SingleDeviceSharding(device, memory_kind=kind))
        for device, parts in rows.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
