"""Masks: which entries of parameters are kept, the same on every grid.

By magnitude, or at random: then those with the largest of drawn numbers are kept. The threshold is found by halving on
counts, so that nothing is sorted or gathered: XLA's sort is slow on CPUs, and a sort of a sharded array gathers it.
"""

import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from axonn_jax.options import PruneScope

_BITS = 31
"""Of a float that is not negative, whose order is that of its bits as an integer; and of a place in an array."""


def magnitude_masks(weights: Mapping[str, jax.Array], density: float, scope: PruneScope) -> dict[str, jax.Array]:
    """Masks of booleans that keep the entries of largest magnitude, laid out as the weights, which are float32.

    `layer`: of every parameter a share `density` of its entries, to the nearest number; `global`: of all together. Of
    equal magnitudes the first are kept, in the order of names and then row by row. Collectives: about 60 all-reduces of
    a number a parameter.
    """
    bits = {name: _order(weight) for name, weight in sorted(weights.items())}
    if scope == "layer":
        return {name: _largest(b, jnp.int32(kept(b.size, density))) for name, b in bits.items()}
    return _largest_of_all(bits, kept(sum(b.size for b in bits.values()), density))


def random_masks(
    weights: Mapping[str, jax.Array], density: float, scope: PruneScope, seed: int
) -> dict[str, jax.Array]:
    """As `magnitude_masks`, of numbers drawn by seed, name and place in place of the magnitudes."""
    drawn = {
        name: _drawn(jax.random.key(seed), jnp.uint32(zlib.crc32(name.encode())), weight)
        for name, weight in weights.items()
    }
    return magnitude_masks(drawn, density, scope)


def kept(entries: int, density: float) -> int:
    """How many of so many entries a density keeps: at least one."""
    return max(1, round(entries * density))


@jax.jit
def _order(weight: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.abs(weight.astype(jnp.float32)), jnp.int32)


@jax.jit
def _drawn(key: jax.Array, number: jax.Array, like: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, number), like.shape, jnp.float32)


@jax.jit
def _largest(bits: jax.Array, count: jax.Array) -> jax.Array:
    """A mask of the `count` largest entries; of equal ones the first."""
    threshold = _least(lambda at: jnp.sum(bits > at, dtype=jnp.int32) <= count)
    return _above(bits, threshold, count - jnp.sum(bits > threshold, dtype=jnp.int32))


def _above(bits: jax.Array, threshold: jax.Array, ties: jax.Array) -> jax.Array:
    """A mask of what is above a threshold, and of the first `ties` entries that are equal to it."""
    place = jnp.arange(bits.size, dtype=jnp.int32).reshape(bits.shape)
    equal = bits == threshold
    last = _least(lambda at: jnp.sum(equal & (place <= at), dtype=jnp.int32) >= ties)
    return (bits > threshold) | (equal & (place <= last) & (ties > 0))


def _least(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The least number of 31 bits for which something holds that holds for all larger ones too."""

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        lower = holds(middle)
        return jnp.where(lower, low, middle + 1), jnp.where(lower, middle, high)

    ends = (jnp.int32(0), jnp.int32(2**_BITS - 1))
    return lax.fori_loop(0, _BITS, halve, ends)[1]


def _largest_of_all(bits: Mapping[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """As `_largest`, over several arrays; counts of many entries add up on the host, where they do not overflow."""
    low, high = 0, 2**_BITS - 1
    while low < high:
        middle = (low + high) // 2
        enough = sum(_more(bits, jnp.int32(middle))) <= count
        low, high = (low, middle) if enough else (middle + 1, high)
    threshold, above, equal = jnp.int32(low), _more(bits, jnp.int32(low)), []
    if low:
        equal = [at_least - more for at_least, more in zip(_more(bits, jnp.int32(low - 1)), above, strict=True)]
    else:
        equal = [b.size - more for b, more in zip(bits.values(), above, strict=True)]
    left, masks = count - sum(above), {}
    for (name, b), ties in zip(bits.items(), equal, strict=True):
        masks[name] = _tied(b, threshold, jnp.int32(min(left, ties)))
        left -= min(left, ties)
    return masks


def _more(bits: Mapping[str, jax.Array], threshold: jax.Array) -> list[int]:
    return [int(count) for count in _counts(dict(bits), threshold).values()]


@jax.jit
def _counts(bits: dict[str, jax.Array], threshold: jax.Array) -> dict[str, jax.Array]:
    return {name: jnp.sum(b > threshold, dtype=jnp.int32) for name, b in bits.items()}


_tied = jax.jit(_above)
