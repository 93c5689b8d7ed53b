"""Masks of the parameter entries to keep, by magnitude or at random, identical on every grid."""

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.core.options import PruneScope
from axonn_jax.core.tensor.params import key_of

T = TypeVar("T")

# The threshold is found by bisection on counts, so that nothing is sorted or gathered: XLA's sort is slow on CPUs, and
# sorting a sharded array gathers it.
#
# Arrays go through a program in `rounds`, and each round is waited for: one program for all kernels of 48 layers takes
# a minute to compile, and one program per kernel, all in flight at once, hangs XLA's CPU devices
# (`distributed.bounded`). Counts are 64-bit integers: a kernel may have more entries than 32 bits can count.

Arrays = list[jax.Array]

# Upper bound of the bisection. Nonnegative floats order like their bits, so magnitudes are compared as int32.
_LARGEST = 2**31 - 1


def magnitude_masks(weights: Mapping[str, jax.Array], density: float, scope: PruneScope) -> dict[str, jax.Array]:
    """Return boolean masks that keep the entries of largest magnitude, laid out like the weights.

    Ties keep the first entries, in the order of names and then row by row.

    Args:
        weights: Float32 parameters by name.
        density: Share of entries to keep.
        scope: "layer" keeps this share of every parameter, "global" of all parameters together.

    Collectives: about 31 all-reduces of one number per parameter, and as many again if ties have to be split.
    """
    if scope == "global":
        return _largest_of_all(weights, keep_count(sum(weight.size for weight in weights.values()), density))
    masks: dict[str, jax.Array] = {}
    for names in rounds(weights):
        arrays = [weights[name] for name in names]
        masks |= zip(
            names,
            _ready(_largest(arrays, np.array([keep_count(weight.size, density) for weight in arrays]))),
            strict=True,
        )
    return masks


def random_masks(
    weights: Mapping[str, jax.Array], density: float, scope: PruneScope, seed: int
) -> dict[str, jax.Array]:
    """Return `magnitude_masks` of random numbers, drawn by seed, parameter name and position.

    The numbers are sharded like the weights. With scope "layer" only those of one round are in memory at a time.
    """
    drawn: dict[str, jax.Array] = {}
    masks: dict[str, jax.Array] = {}
    for names in rounds(weights):
        # crc32, not `hash`, which differs between processes.
        numbers = jnp.asarray([zlib.crc32(name.encode()) for name in names], jnp.uint32)
        kinds = tuple((weights[name].shape, weights[name].sharding) for name in names)
        of_round = dict(zip(names, _ready(_drawn(key_of(seed), numbers, kinds)), strict=True))
        if scope == "global":
            drawn |= of_round
        else:
            masks |= magnitude_masks(of_round, density, scope)
    return magnitude_masks(drawn, density, scope) if scope == "global" else masks


def keep_count(entries: int, density: float) -> int:
    """Return how many of `entries` a density keeps, at least one."""
    return max(1, round(entries * density))


def rounds(arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Return the names in groups, none of which has two arrays of the same shape and layout.

    A transformer's groups hold one kernel of each kind: about as many groups as layers, which share one program.
    """
    seen: dict[Hashable, int] = {}
    groups: list[list[str]] = []
    for name in sorted(arrays):
        kind = (arrays[name].shape, arrays[name].sharding)
        turn = seen[kind] = seen.get(kind, -1) + 1
        if turn == len(groups):
            groups.append([])
        groups[turn].append(name)
    return groups


def counting(program: Callable[..., T], **options: Any) -> Callable[..., T]:
    """Compile a program with 64-bit integers enabled; `options` are those of `jax.jit`."""
    compiled = jax.jit(program, **options)

    @wraps(program)
    def run(*args: object) -> T:
        with jax.enable_x64(True):
            return compiled(*args)

    return run


def totals(masks: Arrays) -> jax.Array:
    """Return the number of entries of each mask, [masks] int64; call it inside a program of `counting`."""
    # A row has fewer than 2**31 entries, so only the sum over rows needs int64.
    return jnp.stack([jnp.sum(jnp.sum(mask, axis=-1, dtype=jnp.int32), dtype=jnp.int64) for mask in masks])


def _ready(arrays: Arrays) -> Arrays:
    return jax.block_until_ready(arrays)  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames="kinds")
def _drawn(
    key: jax.Array, numbers: jax.Array, kinds: tuple[tuple[tuple[int, ...], jax.sharding.Sharding], ...]
) -> Arrays:
    return [
        lax.with_sharding_constraint(
            jax.random.uniform(jax.random.fold_in(key, numbers[at]), shape, jnp.float32), sharding
        )
        for at, (shape, sharding) in enumerate(kinds)
    ]


@counting
def _largest(weights: Arrays, counts: jax.Array) -> Arrays:
    orders = _orders(weights)
    low = jnp.zeros(len(orders), jnp.int32)
    threshold = _least(lambda at: totals(_larger(orders, at)) <= counts, low, low + _LARGEST)
    return _above(weights, threshold, counts - totals(_larger(orders, threshold)))


def _orders(weights: Arrays) -> Arrays:
    # Magnitudes as integers of the same order.
    return [lax.bitcast_convert_type(jnp.abs(weight.astype(jnp.float32)), jnp.int32) for weight in weights]


def _larger(orders: Arrays, than: jax.Array) -> Arrays:
    return [order > at for order, at in zip(orders, than, strict=True)]


@counting
def _above(weights: Arrays, threshold: jax.Array, ties: jax.Array) -> Arrays:
    # Masks of the entries above each threshold, and of the first `ties` entries equal to it.
    orders = _orders(weights)
    equal = [order == at for order, at in zip(orders, threshold, strict=True)]
    places = [jnp.arange(order.size, dtype=jnp.int64).reshape(order.shape) for order in orders]

    def first(last: jax.Array) -> Arrays:
        return [tied & (place <= at) for tied, place, at in zip(equal, places, last, strict=True)]

    high = jnp.array([order.size - 1 for order in orders])
    # A second bisection, over positions, runs only where some ties are kept and others are not.
    parted = (ties > 0) & (ties < totals(equal))
    last = _least(lambda at: totals(first(at)) >= ties, jnp.where(parted, 0, high), high)
    larger = _larger(orders, threshold)
    return [above | (tied & keeps_ties) for above, tied, keeps_ties in zip(larger, first(last), ties > 0, strict=True)]


def _least(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    # Bisection: `holds` is monotonic and true at `high`; returns the least number for which it is true.

    def halve(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        lower = holds(middle)
        return jnp.where(lower, low, middle + 1), jnp.where(lower, middle, high)

    return lax.while_loop(lambda ends: jnp.any(ends[0] < ends[1]), halve, (low, high))[1]


def _largest_of_all(weights: Mapping[str, jax.Array], count: int) -> dict[str, jax.Array]:
    # The host adds up the counts of all rounds, so the bisection cannot be one compiled loop as in `_largest`.
    groups = [(names, [weights[name] for name in names]) for names in rounds(weights)]

    def entries_above(threshold: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for names, arrays in groups:
            entries = _count_above(arrays, np.full(len(arrays), threshold, np.int32))
            counts |= zip(names, np.asarray(entries).tolist(), strict=True)
        return counts

    low, high = 0, _LARGEST
    while low < high:
        middle = (low + high) // 2
        enough = sum(entries_above(middle).values()) <= count
        low, high = (low, middle) if enough else (middle + 1, high)
    above, at_least = entries_above(low), entries_above(low - 1)
    # Hand out the remaining entries in the order of names, so that the choice among ties is the same on every grid.
    ties_left, ties = count - sum(above.values()), {}
    for name in sorted(weights):
        ties[name] = min(ties_left, at_least[name] - above[name])
        ties_left -= ties[name]
    masks: dict[str, jax.Array] = {}
    for names, arrays in groups:
        threshold, tie_counts = np.full(len(names), low, np.int32), np.array([ties[name] for name in names])
        masks |= zip(names, _ready(_above(arrays, threshold, tie_counts)), strict=True)
    return masks


@counting
def _count_above(weights: Arrays, threshold: jax.Array) -> jax.Array:
    return totals(_larger(_orders(weights), threshold))


WINDOW = 5
"""Number of consecutive masks that must agree (the length of the paper's queue)."""


class EarlyBird:
    """Search during training for the first mask that no longer changes (Early-Bird Tickets, You et al., ICLR 2020).

    Holds the last four masks on their devices, one byte per entry each.
    """

    # The paper divides the entries in which two masks differ by all entries. But random masks of density f differ in
    # 2f(1-f) of the entries, at density 0.05 below the paper's threshold of 0.1. `distance` divides by that instead.

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._last: deque[Mapping[str, jax.Array]] = deque(maxlen=WINDOW - 1)
        self.distance: float | None = None  # largest distance to one of the previous masks, at the last call of `done`

    def done(self, masks: Mapping[str, jax.Array]) -> bool:
        """Return True if the distance of `masks` to each of the previous four is at most `threshold`.

        Collectives: all-reduces of three numbers per parameter and previous mask.
        """
        previous = list(self._last)
        self.distance = max((distance(masks, earlier) for earlier in previous), default=None)
        self._last.append(masks)
        return len(previous) == WINDOW - 1 and self.distance is not None and self.distance <= self.threshold


def distance(masks: Mapping[str, jax.Array], earlier: Mapping[str, jax.Array]) -> float:
    """Return the number of entries in which masks differ, over its expectation for random masks of the same sizes.

    0 means equal masks, about 1 unrelated ones.
    """
    differing, by_chance = 0, 0.0
    for names in rounds(masks):
        counts = np.asarray(_differing([masks[name] for name in names], [earlier[name] for name in names]))
        for name, (differs, now, then) in zip(names, counts.T.tolist(), strict=True):
            size = masks[name].size
            differing += differs
            by_chance += (now * (size - then) + then * (size - now)) / size
    return differing / by_chance if by_chance else 0.0


@counting
def _differing(masks: Arrays, earlier: Arrays) -> jax.Array:
    # [3, masks]: entries in which two masks differ, that the new mask keeps, that the earlier one keeps.
    differs = [mask != old for mask, old in zip(masks, earlier, strict=True)]
    return jnp.stack([totals(differs), totals(masks), totals(earlier)])
