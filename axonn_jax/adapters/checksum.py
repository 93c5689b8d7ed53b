"""Checksum by which the base of adapters is known again, on every grid, in every precision, and in files."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.memory.host_arrays import joined
from axonn_jax.tensor.params import Params

_ODD = (2654435761, 2246822519, 3266489917)
"""Odd numbers that weigh an entry's place along each dim."""


def checksum(numbers: Mapping[str, int], names: Iterable[str], sync: HostSync) -> str:
    """Return the checksum of a base by the numbers of its weights (`number_of`).

    Every process gives the numbers of the weights that it holds, of all `names`. Collectives: between processes 8
    bytes a weight and process.
    """
    names = sorted(names)
    rows = sync.gathered({0: tuple(float(numbers.get(name, 0)) for name in names)})  # 32 bits are exact
    return _digest((name, int(max(held))) for name, held in zip(names, zip(*rows, strict=True), strict=True))


def checksum_of_files(weights: Iterable[tuple[str, NDArray[Any]]]) -> str:
    """Return the same of whole weights on the host, one after another."""

    def number(value: NDArray[Any]) -> int:
        return int(_weighed(value.astype(ml_dtypes.bfloat16).view(np.uint16), np))

    return _digest(sorted((name, number(value)) for name, value in weights))


def number_of(weight: Any) -> int:
    """Return the number of a weight that is rounded to bfloat16; of float16 it would be another.

    Collectives: an all-reduce of a number.
    """
    return int(_mixed(joined(weight)))


def numbers_of(weights: Mapping[str, Any], rounded: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of weights by name, of float16 ones those that are known from before they were `rounded`."""
    return {name: rounded[name] if name in rounded else number_of(value) for name, value in weights.items()}


def read_numbered(
    read: Callable[[Mapping[str, Any]], Params], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[Params, dict[str, int]]:
    """Read weights; return the numbers of those wanted in float16 too, which are taken before they are rounded.

    These are read one by one in float32.
    """
    narrow = {name: want for name, want in wanted.items() if want.dtype == jnp.float16}
    rest = {name: want for name, want in wanted.items() if name not in narrow}
    made, numbers = (read(rest) if rest else {}), dict[str, int]()
    for name, want in narrow.items():
        wide = read({name: jax.ShapeDtypeStruct(want.shape, jnp.float32, sharding=want.sharding)})[name]
        numbers[name], made[name] = number_of(wide), wide.astype(want.dtype)
        jax.block_until_ready(made[name])
        wide.delete()
    return made, numbers


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
