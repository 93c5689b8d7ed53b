"""Masks of the parameter entries to keep, the same on every grid.

By magnitude, or at random: entries with the largest random numbers are kept. The threshold is found by halving on
counts, so that nothing is sorted or gathered: XLA's sort is slow on CPUs, and a sort of a sharded array gathers it.

Arrays go through a program by `rounds`, and each round is waited for: one program for all kernels of 48 layers compiles
for a minute, and one for each in flight at once hangs XLA's CPU devices (`distributed.bounded`). Counts are 64-bit
integers: a kernel may have more entries than 32 bits count.
"""

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.options import PruneScope
from axonn_jax.tensor.params import key_of

Arrays = list[jax.Array]
_LARGEST = 2**31 - 1
"""Bits, as an integer, of the largest float32: entries are ordered by the bits of their magnitudes."""


def magnitude_masks(weights: Mapping[str, jax.Array], density: float, scope: PruneScope) -> dict[str, jax.Array]:
    """Masks of booleans that keep the entries of largest magnitude, laid out as the weights, which are float32.

    `layer`: of every parameter a share `density` of its entries, to the nearest number; `global`: of all together. Of
    equal magnitudes the first are kept, in the order of names and then row by row. Collectives: about 31 all-reduces of
    a number a parameter, and as many again where equal magnitudes are parted.
    """
    if scope == "global":
        return _largest_of_all(weights, kept(sum(weight.size for weight in weights.values()), density))
    masks: dict[str, jax.Array] = {}
    for names in rounds(weights):
        chosen = [weights[name] for name in names]
        masks |= zip(
            names, _ready(_largest(chosen, np.array([kept(weight.size, density) for weight in chosen]))), strict=True
        )
    return masks


def random_masks(
    weights: Mapping[str, jax.Array], density: float, scope: PruneScope, seed: int
) -> dict[str, jax.Array]:
    """Masks that keep random entries: `magnitude_masks` of numbers drawn by seed, name and place.

    Numbers are drawn as the weights lie; with scope `layer` those of one round are there at a time, else all.
    """
    drawn: dict[str, jax.Array] = {}
    masks: dict[str, jax.Array] = {}
    for names in rounds(weights):
        numbers = jnp.asarray([zlib.crc32(name.encode()) for name in names], jnp.uint32)
        kinds = tuple((weights[name].shape, weights[name].sharding) for name in names)
        of_round = dict(zip(names, _ready(_drawn(key_of(seed), numbers, kinds)), strict=True))
        if scope == "global":
            drawn |= of_round
        else:
            masks |= magnitude_masks(of_round, density, scope)
    return magnitude_masks(drawn, density, scope) if scope == "global" else masks


def kept(entries: int, density: float) -> int:
    """Number of kept entries of `entries` at a density: at least one."""
    return max(1, round(entries * density))


def rounds(arrays: Mapping[str, jax.Array]) -> list[list[str]]:
    """Return names of arrays in groups without two of one shape and layout, so that few programs serve all groups.

    A transformer's first round has one kernel of each kind, and so have the next: about as many rounds as layers.
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


def counting(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A program, compiled with the options of `jax.jit`, in which integers may have 64 bits."""
    compiled = jax.jit(program, **options)

    @wraps(program)
    def run(*args: Any) -> Any:
        with jax.enable_x64(True):
            return compiled(*args)

    return run


def totals(masks: Arrays) -> jax.Array:
    """Entries of each mask, [masks], in a program of `counting`; a row has fewer than 2^31."""
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
    """Masks of the `counts` largest entries of each; of equal ones the first."""
    orders = _orders(weights)
    low = jnp.zeros(len(orders), jnp.int32)
    threshold = _least(lambda at: totals(_larger(orders, at)) <= counts, low, low + _LARGEST)
    return _above(weights, threshold, counts - totals(_larger(orders, threshold)))


def _orders(weights: Arrays) -> Arrays:
    """Magnitudes as integers of the same order."""
    return [lax.bitcast_convert_type(jnp.abs(weight.astype(jnp.float32)), jnp.int32) for weight in weights]


def _larger(orders: Arrays, than: jax.Array) -> Arrays:
    return [order > at for order, at in zip(orders, than, strict=True)]


@counting
def _above(weights: Arrays, threshold: jax.Array, ties: jax.Array) -> Arrays:
    """Masks of the entries above each threshold, and of the first `ties` entries equal to it."""
    orders = _orders(weights)
    equal = [order == at for order, at in zip(orders, threshold, strict=True)]
    places = [jnp.arange(order.size, dtype=jnp.int64).reshape(order.shape) for order in orders]

    def first(last: jax.Array) -> Arrays:
        return [tied & (place <= at) for tied, place, at in zip(equal, places, last, strict=True)]

    high = jnp.array([order.size - 1 for order in orders])
    parted = (ties > 0) & (ties < totals(equal))
    last = _least(lambda at: totals(first(at)) >= ties, jnp.where(parted, 0, high), high)
    larger = _larger(orders, threshold)
    return [above | (tied & kept) for above, tied, kept in zip(larger, first(last), ties > 0, strict=True)]


def _least(holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array) -> jax.Array:
    """The least numbers from `low` to `high` for which something holds that holds for all larger ones, `high` too."""

    def halve(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        lower = holds(middle)
        return jnp.where(lower, low, middle + 1), jnp.where(lower, middle, high)

    return lax.while_loop(lambda ends: jnp.any(ends[0] < ends[1]), halve, (low, high))[1]


def _largest_of_all(weights: Mapping[str, jax.Array], count: int) -> dict[str, jax.Array]:
    """Masks of the `count` largest entries of all arrays together; each round's counts add up on the host."""
    groups = [(names, [weights[name] for name in names]) for names in rounds(weights)]

    def more(threshold: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for names, chosen in groups:
            entries = _more(chosen, np.full(len(chosen), threshold, np.int32))
            counts |= zip(names, np.asarray(entries).tolist(), strict=True)
        return counts

    low, high = 0, _LARGEST
    while low < high:
        middle = (low + high) // 2
        enough = sum(more(middle).values()) <= count
        low, high = (low, middle) if enough else (middle + 1, high)
    above, at_least = more(low), more(low - 1)
    left, ties = count - sum(above.values()), {}
    for name in sorted(weights):
        ties[name] = min(left, at_least[name] - above[name])
        left -= ties[name]
    masks: dict[str, jax.Array] = {}
    for names, chosen in groups:
        threshold, own = np.full(len(names), low, np.int32), np.array([ties[name] for name in names])
        masks |= zip(names, _ready(_above(chosen, threshold, own)), strict=True)
    return masks


@counting
def _more(weights: Arrays, threshold: jax.Array) -> jax.Array:
    return totals(_larger(_orders(weights), threshold))


WINDOW = 5
"""Masks in a row that must be alike (the paper's queue)."""


class EarlyBird:
    """Search for a mask while a run trains: the first that no longer changes (You et al., ICLR 2020).

    It remembers the last four masks; each has a byte an entry on its devices. The paper counts the entries in which two
    masks differ over all entries. Masks drawn at random, of density f, differ in 2f(1-f) of them: at density 0.05 in
    fewer than the paper's threshold of a tenth. So differences are counted over those.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold
        self._last: deque[Mapping[str, jax.Array]] = deque(maxlen=WINDOW - 1)
        self.distance: float | None = None
        """The largest to one of the masks before, at the last look."""

    def done(self, masks: Mapping[str, jax.Array]) -> bool:
        """True if the newest mask's `distance` to each of the four before is at most `threshold`.

        Collectives: all-reduces of three numbers a parameter and mask.
        """
        before = list(self._last)
        self.distance = max((distance(masks, earlier) for earlier in before), default=None)
        self._last.append(masks)
        return len(before) == WINDOW - 1 and self.distance is not None and self.distance <= self.threshold


def distance(masks: Mapping[str, jax.Array], earlier: Mapping[str, jax.Array]) -> float:
    """Return the entries in which two masks differ, as a share of those in which random masks would differ.

    A random mask keeps as many entries of every parameter as the mask does: 0 means equal masks, about 1 unrelated
    ones.
    """
    differing, by_chance = 0, 0.0
    for names in rounds(masks):
        counts = np.asarray(_differing([masks[name] for name in names], [earlier[name] for name in names]))
        for name, (apart, now, then) in zip(names, counts.T.tolist(), strict=True):
            size = masks[name].size
            differing += apart
            by_chance += (now * (size - then) + then * (size - now)) / size
    return differing / by_chance if by_chance else 0.0


@counting
def _differing(masks: Arrays, earlier: Arrays) -> jax.Array:
    """Count entries in which masks differ, that each mask keeps, and that the earlier one keeps: [3, masks]."""
    apart = [mask != before for mask, before in zip(masks, earlier, strict=True)]
    return jnp.stack([totals(apart), totals(masks), totals(earlier)])
