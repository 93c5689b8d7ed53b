"""Grouped matmuls: the feed-forward layers of a device's experts, each on the tokens choosing this expert.

Tokens are put in the order of their experts. Where an expert has few, its first ones fill slots, those of all experts
in one batched product; a loop goes over experts with further tokens, and an inner one over tiles of these. So every
token is computed, however uneven the choices, without a buffer for the worst case; nothing of the inner width is kept,
as the backward pass computes it again. `jax.lax.ragged_dot` has no such form on CPUs, and on GPUs without Triton
multiplies every token with every expert.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax import compat
from axonn_jax.options import Mlp
from axonn_jax.tensor.collectives import mark_varying
from axonn_jax.tensor.elementwise import activated

_FEWEST, _MOST = 32, 128
"""Tokens of a tile: with fewer the sums of the kernels' gradients take longer than the products, with more the last
tile's padding costs too much."""


class _Kernels(NamedTuple):
    gate: jax.Array | None
    up: jax.Array
    down: jax.Array


class _Groups(NamedTuple):
    """Choices in the order of their experts."""

    order: jax.Array
    """Their numbers (token times k, plus which), and a tile of anything behind them."""
    starts: jax.Array
    """Start of each expert's tokens, and the end of the last expert's."""

    def rest(self, slots: int) -> tuple[jax.Array, jax.Array]:
        """Return experts, those with tokens behind `slots` first, and how many these are."""
        more = self.starts[1:] - self.starts[:-1] > slots
        return jnp.argsort(~more), jnp.sum(more)


class _Sizes(NamedTuple):
    """Tokens of an expert that are computed together."""

    slots: int
    """In the batched product; 0: there is none."""
    tile: int
    """In a round of the loop."""


def grouped_mlp(
    x: jax.Array,
    choices: jax.Array,
    weights: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    activation: Mlp,
) -> jax.Array:
    """Sum over a token's choices of `weight * down(activation(gate x) * up x)`; without `gate` of `activation(up x)`.

    Shapes: `x` [tokens, hidden], `choices` and `weights` [tokens, k], a token's choices all different, `gate` and `up`
    [experts, hidden, ffn], `down` [experts, ffn, hidden] -> like `x`. Choices of other experts count nothing. Sums over
    tiles and choices are float32; no collectives.
    """
    sizes = _sizes(choices.shape[0], choices.shape[1], up.shape[0])
    groups = _sorted(choices, up.shape[0], max(sizes))
    axes = frozenset().union(*map(compat.varying_axes, jax.tree.leaves((x, groups, weights, gate, up, down))))
    x, groups, weights, gate, up, down = jax.tree.map(
        lambda a: mark_varying(a, axes), (x, groups, weights, gate, up, down)
    )
    return _grouped(x, weights, _Kernels(gate, up, down), groups, activation, sizes)


def _sizes(tokens: int, k: int, experts: int) -> _Sizes:
    """Slots for nearly all of random choices; a tile of a power of two near the mean, no more than there are tokens.

    Slots pay where a second tile would be nearly empty, and until their rows are too many for a processor's cache.
    """
    mean = max(tokens * k // experts, 1)
    tile = min(max(1 << (mean.bit_length() - 1), _FEWEST), _MOST, 1 << (tokens - 1).bit_length())
    pays = _MOST // 2 < mean <= _MOST and experts <= 32
    return _Sizes(16 * ceil((mean + 2.5 * sqrt(mean)) / 16) if pays else 0, tile)


def _sorted(choices: jax.Array, experts: int, tile: int) -> _Groups:
    flat = choices.reshape(-1)
    count = flat.size
    if (experts + 1) * count >= 2**31:
        raise ValueError(f"{count} choices of {experts} experts do not fit 32-bit numbers")
    number = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    keys = lax.sort(number * count + lax.iota(jnp.int32, count))
    starts = jnp.searchsorted(keys, jnp.arange(experts + 1, dtype=jnp.int32) * count).astype(jnp.int32)
    return _Groups(jnp.pad(keys % count, (0, tile)), starts)


class _Tile(NamedTuple):
    """Some tokens of one expert."""

    numbers: jax.Array
    """Numbers of the tile's choices."""
    tokens: jax.Array
    """Their rows; where the last tile is not full, the row behind all tokens, which is zero and added to in vain:
    another expert's token there would take part, and 0 times infinity is NaN."""
    here: jax.Array
    """Return True for rows of the tile with a token of the expert, [tile]."""


def _tile(groups: _Groups, expert: jax.Array, at: jax.Array | int, choices: tuple[int, ...], size: int) -> _Tile:
    """Return tokens of an expert from its `at`-th one on; `choices` are [tokens, k]."""
    count, k = choices
    first = groups.starts[expert] + at
    numbers = lax.dynamic_slice(groups.order, (first,), (size,))
    here = first + jnp.arange(size) < groups.starts[expert + 1]
    return _Tile(numbers, jnp.where(here, numbers // k, count), here)


def _over_tiles(
    body: Callable[[_Tile, _Kernels, Any], Any], kernels: _Kernels, groups: _Groups,
    choices: tuple[int, ...], sizes: _Sizes, expert: jax.Array, carry: Any,
) -> Any:  # fmt: skip
    """Call body(tile, kernels, carry) for the tiles of an expert, as many as its tokens behind the slots fill."""
    own = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), kernels)  # once for all tiles
    count = groups.starts[expert + 1] - groups.starts[expert] - sizes.slots

    def run(i: jax.Array, carry: Any) -> Any:
        return body(_tile(groups, expert, sizes.slots + i * sizes.tile, choices, sizes.tile), own, carry)

    return lax.fori_loop(0, (count + sizes.tile - 1) // sizes.tile, run, carry)


def _in_slots(groups: _Groups, experts: int, choices: tuple[int, ...], slots: int) -> _Tile:
    """Return the first tokens of every expert, each array [experts, slots]."""
    return jax.vmap(lambda expert: _tile(groups, expert, 0, choices, slots))(jnp.arange(experts))


def _inner(x: jax.Array, own: _Kernels) -> tuple[jax.Array | None, jax.Array]:
    return None if own.gate is None else x @ own.gate, x @ own.up


def _zeros(shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    return mark_varying(jnp.zeros(shape, jnp.float32), compat.varying_axes(like))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(
    x: jax.Array, weights: jax.Array, kernels: _Kernels, groups: _Groups, activation: Mlp, sizes: _Sizes
) -> jax.Array:
    x, flat = _and_a_row(x), weights.reshape(-1)

    def output(of: _Tile, own: _Kernels) -> jax.Array:
        h = activated(activation, *_inner(x[of.tokens], own))
        return jnp.matmul(h, own.down, preferred_element_type=jnp.float32) * flat[of.numbers][:, None]

    def add(of: _Tile, own: _Kernels, y: jax.Array) -> jax.Array:
        return y.at[of.tokens].add(output(of, own))

    y = _zeros(x.shape, x)
    if sizes.slots:
        first = _in_slots(groups, kernels.up.shape[0], weights.shape, sizes.slots)
        y = y.at[first.tokens].add(jax.vmap(output)(first, kernels))
    order, count = groups.rest(sizes.slots)
    over = partial(_over_tiles, add, kernels, groups, weights.shape, sizes)
    return lax.fori_loop(0, count, lambda i, y: over(order[i], y), y)[:-1].astype(x.dtype)


def _and_a_row(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 1), (0, 0)))


def _forward(
    x: jax.Array, weights: jax.Array, kernels: _Kernels, groups: _Groups, activation: Mlp, sizes: _Sizes
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped(x, weights, kernels, groups, activation, sizes), (x, weights, kernels, groups)


def _backward(activation: Mlp, sizes: _Sizes, kept: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    x, weights, kernels, groups = kept
    x, dy, flat = _and_a_row(x), _and_a_row(dy), weights.reshape(-1)

    def gradients(of: _Tile, own: _Kernels) -> tuple[jax.Array, jax.Array, _Kernels]:
        rows, dout = x[of.tokens], dy[of.tokens]
        h, pull = jax.vjp(partial(activated, activation), *_inner(rows, own))
        dh = dout @ own.down.T  # of an unweighted output
        dweight = jnp.where(of.here, jnp.sum(dh.astype(jnp.float32) * h.astype(jnp.float32), -1), 0.0)
        weight = jnp.where(of.here, flat[of.numbers], 0.0)[:, None].astype(x.dtype)
        dgate, dup = pull(dh * weight)
        drows = jnp.matmul(dup, own.up.T, preferred_element_type=jnp.float32)
        if own.gate is not None:
            drows += jnp.matmul(dgate, own.gate.T, preferred_element_type=jnp.float32)
        of_gate = None if own.gate is None else _product(rows, dgate)
        return drows, dweight, _Kernels(of_gate, _product(rows, dup), _product(h, dout * weight))

    def add(of: _Tile, own: _Kernels, sums: Any) -> Any:
        dx, dweights, dkernels = sums
        drows, dweight, grads = gradients(of, own)
        dx, dweights = dx.at[of.tokens].add(drows), dweights.at[of.numbers].add(dweight)
        return dx, dweights, jax.tree.map(jnp.add, dkernels, grads)

    def of_expert(i: jax.Array, sums: Any) -> Any:
        dx, dweights, dkernels = sums
        own = jax.tree.map(
            lambda w: lax.dynamic_index_in_dim(w, order[i], keepdims=False).astype(jnp.float32), dkernels
        )
        dx, dweights, own = _over_tiles(add, kernels, groups, weights.shape, sizes, order[i], (dx, dweights, own))
        written = jax.tree.map(
            lambda all_of, own: lax.dynamic_update_index_in_dim(all_of, own.astype(all_of.dtype), order[i], 0),
            dkernels,
            own,
        )
        return dx, dweights, written

    order, count = groups.rest(sizes.slots)
    dx, dweights, dkernels = _zeros(x.shape, x), _zeros(flat.shape, flat), jax.tree.map(jnp.zeros_like, kernels)
    if sizes.slots:
        first = _in_slots(groups, kernels.up.shape[0], weights.shape, sizes.slots)
        drows, dweight, dkernels = jax.vmap(gradients)(first, kernels)
        dx, dweights = dx.at[first.tokens].add(drows), dweights.at[first.numbers].add(dweight)
    dx, dweights, dkernels = lax.fori_loop(0, count, of_expert, (dx, dweights, dkernels))
    dkernels = jax.tree.map(lambda grad, w: grad.astype(w.dtype), dkernels, kernels)
    unused = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), groups)
    return dx[:-1].astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype), dkernels, unused


def _product(rows: jax.Array, grad: jax.Array) -> jax.Array:
    """A tile's part of a kernel's gradient."""
    return jnp.matmul(rows.T, grad, preferred_element_type=jnp.float32)


_grouped.defvjp(_forward, _backward)
