"""Checksum that identifies the base of adapters on every grid, in every precision, and in files."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.memory.host_arrays import LazyArray, materialize
from axonn_jax.core.tensor.params import Params

# A weight's number is the sum of its bfloat16 bits, each times a factor for its position, modulo 2**32. The order of an
# integer sum does not matter, so every grid gets the same number. All factors are odd, hence invertible: changing a
# single entry always changes the number.
_ODD = (2654435761, 2246822519, 3266489917)


def checksum(numbers: Mapping[str, int], names: Iterable[str], sync: HostSync) -> str:
    """Return the checksum of a base from the numbers of its weights (`number_of`).

    Args:
        numbers: Numbers of the weights that this process holds, by name.
        names: Names of all weights of the base.
        sync: Exchange between processes: 8 bytes per weight and process.
    """
    names = sorted(names)
    # Numbers have 32 bits, which a float64 holds exactly. Processes without the weight report 0, hence the maximum.
    rows = sync.gathered({0: tuple(float(numbers.get(name, 0)) for name in names)})
    return _digest((name, int(max(reported))) for name, reported in zip(names, zip(*rows, strict=True), strict=True))


def checksum_of_files(weights: Iterable[tuple[str, NDArray[np.generic]]]) -> str:
    """Return the checksum of unsharded weights on the host, which are consumed one at a time."""

    def number(value: NDArray[np.generic]) -> int:
        return int(_weighed(value.astype(ml_dtypes.bfloat16).view(np.uint16), np))

    return _digest(sorted((name, number(value)) for name, value in weights))


def number_of(weight: jax.Array | LazyArray) -> int:
    """Return the number of a weight in bfloat16 or wider; collectives: an all-reduce of one number."""
    # Rounding to float16 first may change the bfloat16 bits, and with them the number: see `read_numbered`.
    return int(_mixed(materialize(weight)))


def numbers_of(weights: Mapping[str, jax.Array | LazyArray], rounded: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers of weights by name, taking those in `rounded` from before they were rounded to float16."""
    return {name: rounded[name] if name in rounded else number_of(value) for name, value in weights.items()}


def read_numbered(
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Params], abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[Params, dict[str, int]]:
    """Read weights in the types of `abstract`, and number those in float16 before they are rounded.

    Returns:
        The weights, and the numbers of the float16 ones, both by name.
    """
    # Read float16 weights one at a time in float32, so that only one wide copy is in memory.
    narrow = {name: want for name, want in abstract.items() if want.dtype == jnp.float16}
    direct = {name: want for name, want in abstract.items() if name not in narrow}
    params, numbers = (read(direct) if direct else {}), dict[str, int]()
    for name, want in narrow.items():
        wide = read({name: jax.ShapeDtypeStruct(want.shape, jnp.float32, sharding=want.sharding)})[name]
        numbers[name], params[name] = number_of(wide), wide.astype(want.dtype)
        jax.block_until_ready(params[name])
        wide.delete()
    return params, numbers


def _digest(numbers: Iterable[tuple[str, int]]) -> str:
    return hashlib.sha256("\n".join(f"{name} {number}" for name, number in numbers).encode()).hexdigest()


@jax.jit
def _mixed(array: jax.Array) -> jax.Array:
    bits: jax.Array = jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)
    return _weighed(bits, jnp)  # type: ignore[no-any-return]


def _weighed(bits: Any, numbers: ModuleType) -> Any:
    # Zero bits add nothing wherever they are, so padding rows beyond a vocabulary do not change the number.
    place = numbers.ones((), np.uint32)
    for dim, odd in zip(range(bits.ndim), _ODD, strict=False):
        along = numbers.arange(bits.shape[dim], dtype=np.uint32) * np.uint32(odd - 1)
        place = place + along.reshape(*[1] * dim, -1, *[1] * (bits.ndim - dim - 1))
    return numbers.sum(bits.astype(np.uint32) * place, dtype=np.uint32)
