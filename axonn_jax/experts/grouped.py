"""Grouped matmuls: the feed-forward layers of a device's experts, each on the tokens choosing this expert.

Tokens are put in the order of their experts; a loop goes over experts, and an inner one over tiles of an expert's
tokens. So every token is computed, however uneven the choices, without a buffer for the worst case; nothing of the
inner width is kept, as the backward pass computes it again, tile by tile. `jax.lax.ragged_dot` has no such form on
CPUs, and on GPUs without Triton multiplies every token with every expert.
"""

from collections.abc import Callable
from functools import partial
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
    tile = _tile(choices.shape[0], choices.shape[1], up.shape[0])
    operands = (x, weights, _Kernels(gate, up, down), _sorted(choices, up.shape[0], tile))
    axes = frozenset().union(*map(compat.varying_axes, jax.tree.leaves(operands)))
    return _grouped(*jax.tree.map(lambda a: mark_varying(a, axes), operands), activation, tile)


def _tile(tokens: int, k: int, experts: int) -> int:
    """A power of two near the mean number of tokens of an expert; no more than there are tokens."""
    mean = max(tokens * k // experts, 1)
    return min(max(1 << (mean.bit_length() - 1), _FEWEST), _MOST, 1 << (tokens - 1).bit_length())


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
    """Their rows; where the last tile is not full, the number of all tokens, whose row is read as zero and never added
    to: another expert's token there would take part, and 0 times infinity is NaN."""
    here: jax.Array
    """Return True for rows of the tile with a token of the expert, [tile]."""


def _over_tiles(
    groups: _Groups, expert: jax.Array, choices: tuple[int, ...], tile: int, body: Callable[..., Any], carry: Any
) -> Any:
    """Call body(tile, carry) for the tiles of an expert, as many as its tokens fill; `choices` are [tokens, k]."""
    count, k = choices
    start, end = groups.starts[expert], groups.starts[expert + 1]

    def run(i: jax.Array, carry: Any) -> Any:
        at = start + i * tile
        numbers = lax.dynamic_slice(groups.order, (at,), (tile,))
        here = at + jnp.arange(tile) < end
        return body(_Tile(numbers, jnp.where(here, numbers // k, count), here), carry)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, run, carry)


def _of_expert(kernels: _Kernels, expert: jax.Array) -> _Kernels:
    """One expert's; outside of the loop over tiles, which would copy them for each."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), kernels)


def _inner(x: jax.Array, own: _Kernels) -> tuple[jax.Array | None, jax.Array]:
    return None if own.gate is None else x @ own.gate, x @ own.up


def _zeros(shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    return mark_varying(jnp.zeros(shape, jnp.float32), compat.varying_axes(like))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(
    x: jax.Array, weights: jax.Array, kernels: _Kernels, groups: _Groups, activation: Mlp, tile: int
) -> jax.Array:
    flat = weights.reshape(-1)

    def of_expert(expert: jax.Array, y: jax.Array) -> jax.Array:
        own = _of_expert(kernels, expert)

        def of_tile(of: _Tile, y: jax.Array) -> jax.Array:
            h = activated(activation, *_inner(_rows(x, of), own))
            out = jnp.matmul(h, own.down, preferred_element_type=jnp.float32)
            return y.at[of.tokens].add(out * flat[of.numbers][:, None], mode="drop")

        return _over_tiles(groups, expert, weights.shape, tile, of_tile, y)

    y = lax.fori_loop(0, kernels.up.shape[0], of_expert, _zeros(x.shape, x))
    return y.astype(x.dtype)


def _rows(x: jax.Array, of: _Tile) -> jax.Array:
    return x.at[of.tokens].get(mode="fill", fill_value=0)


def _backward(activation: Mlp, tile: int, kept: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    x, weights, kernels, groups = kept
    flat = weights.reshape(-1)

    def of_expert(expert: jax.Array, sums: Any) -> Any:
        own = _of_expert(kernels, expert)

        def of_tile(of: _Tile, sums: Any) -> Any:
            dx, dweights, dkernels = sums
            rows, dout = _rows(x, of), _rows(dy, of)
            h, pull = jax.vjp(partial(activated, activation), *_inner(rows, own))
            dh = dout @ own.down.T  # of an unweighted output
            dweight = jnp.where(of.here, jnp.sum(dh.astype(jnp.float32) * h.astype(jnp.float32), -1), 0.0)
            weight = jnp.where(of.here, flat[of.numbers], 0.0)[:, None].astype(x.dtype)
            dgate, dup = pull(dh * weight)
            drows = jnp.matmul(dup, own.up.T, preferred_element_type=jnp.float32)
            if own.gate is not None:
                drows += jnp.matmul(dgate, own.gate.T, preferred_element_type=jnp.float32)
            grads = _Kernels(
                None if own.gate is None else _product(rows, dgate), _product(rows, dup), _product(h, dout * weight)
            )
            return (
                dx.at[of.tokens].add(drows, mode="drop"),
                dweights.at[of.numbers].add(dweight),
                jax.tree.map(jnp.add, dkernels, grads),
            )

        dx, dweights, dkernels = sums
        none = jax.tree.map(lambda w: _zeros(w.shape, w), own)
        dx, dweights, grads = _over_tiles(groups, expert, weights.shape, tile, of_tile, (dx, dweights, none))
        written = jax.tree.map(
            lambda all_of, own: lax.dynamic_update_index_in_dim(all_of, own.astype(all_of.dtype), expert, 0),
            dkernels,
            grads,
        )
        return dx, dweights, written

    start = (_zeros(x.shape, x), _zeros(flat.shape, flat), jax.tree.map(jnp.zeros_like, kernels))
    dx, dweights, dkernels = lax.fori_loop(0, kernels.up.shape[0], of_expert, start)
    unused = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), groups)
    return dx.astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype), dkernels, unused


def _product(rows: jax.Array, grad: jax.Array) -> jax.Array:
    """A tile's part of a kernel's gradient."""
    return jnp.matmul(rows.T, grad, preferred_element_type=jnp.float32)


_grouped.defvjp(lambda *given: (_grouped(*given), given[:4]), _backward)
