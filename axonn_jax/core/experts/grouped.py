"""Grouped matmuls: each local expert's feed-forward layer on the tokens that choose it."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.core import compat
from axonn_jax.core.options import Mlp
from axonn_jax.core.tensor.collectives import mark_varying
from axonn_jax.core.tensor.elementwise import activated

# Tokens are sorted by expert; a loop over experts contains a loop over tiles of an expert's tokens. However uneven the
# choices, no token is dropped and no worst-case buffer is allocated. Inner activations are not saved: the backward pass
# recomputes them tile by tile. `jax.lax.ragged_dot` cannot do this on CPUs, and on GPUs without Triton it multiplies
# every token by every expert.

# Bounds on the tokens in a tile. With fewer, accumulating the kernels' gradients takes longer than the products; with
# more, the padding of the last tile costs too much.
_FEWEST, _MOST = 32, 128


class _Kernels(NamedTuple):
    gate: jax.Array | None
    up: jax.Array
    down: jax.Array


class _Groups(NamedTuple):
    order: jax.Array  # flat indices into [tokens, k], sorted by expert and padded by one tile
    starts: jax.Array  # start of each expert's choices in `order`, and the end of the last expert's


_Operands = tuple[jax.Array, jax.Array, _Kernels, _Groups]
_Gradients = tuple[jax.Array, jax.Array, _Kernels]
Sums = TypeVar("Sums")


def grouped_mlp(
    x: jax.Array,
    choices: jax.Array,
    weights: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    down: jax.Array,
    activation: Mlp,
) -> jax.Array:
    """Return `sum over choices of weight * down(activation(gate x) * up x)` for each token; no collectives.

    Args:
        x: Tokens, [tokens, hidden].
        choices: Local expert indices, [tokens, k], all different within a token; out-of-range ones are ignored.
        weights: Weights of the choices, [tokens, k].
        gate: Kernels of the gate, [experts, hidden, ffn]; None applies the activation to `up x` itself.
        up: Kernels into the experts, [experts, hidden, ffn].
        down: Kernels out of the experts, [experts, ffn, hidden].
        activation: Kind of feed-forward layer.

    Returns:
        An array shaped like `x`, in its dtype; accumulated in float32.
    """
    tile = _tile(choices.shape[0], choices.shape[1], up.shape[0])
    operands = (x, weights, _Kernels(gate, up, down), _sorted(choices, up.shape[0], tile))
    axes = frozenset().union(*map(compat.varying_axes, jax.tree.leaves(operands)))
    return _grouped(*jax.tree.map(lambda a: mark_varying(a, axes), operands), activation, tile)


def _tile(tokens: int, k: int, experts: int) -> int:
    # A power of two near an expert's mean load, but no larger than the number of tokens.
    mean = max(tokens * k // experts, 1)
    return min(max(1 << (mean.bit_length() - 1), _FEWEST), _MOST, 1 << (tokens - 1).bit_length())


def _sorted(choices: jax.Array, experts: int, tile: int) -> _Groups:
    flat = choices.reshape(-1)
    count = flat.size
    if (experts + 1) * count >= 2**31:
        raise ValueError(f"{count} choices of {experts} experts do not fit 32-bit numbers")
    # One sort of int32 keys (expert, position) gives a stable order by expert without carrying a second operand.
    number = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    keys = lax.sort(number * count + lax.iota(jnp.int32, count))
    starts = jnp.searchsorted(keys, jnp.arange(experts + 1, dtype=jnp.int32) * count).astype(jnp.int32)
    return _Groups(jnp.pad(keys % count, (0, tile)), starts)


class _Tile(NamedTuple):
    numbers: jax.Array  # flat indices of the tile's choices, [tile]
    # Row of each choice in `x`. Past the end of the expert's tokens it is out of range, so that it reads zeros and adds
    # nothing: masking another expert's token by a zero weight would turn its infinities into NaN.
    tokens: jax.Array
    valid: jax.Array  # True for rows that hold a token of the expert, [tile]


def _over_tiles(
    groups: _Groups,
    expert: jax.Array,
    choices: tuple[int, ...],
    tile: int,
    body: Callable[[_Tile, Sums], Sums],
    carry: Sums,
) -> Sums:
    count, k = choices
    start, end = groups.starts[expert], groups.starts[expert + 1]

    def run(i: jax.Array, carry: Sums) -> Sums:
        at = start + i * tile
        numbers = lax.dynamic_slice(groups.order, (at,), (tile,))
        valid = at + jnp.arange(tile) < end
        return body(_Tile(numbers, jnp.where(valid, numbers // k, count), valid), carry)

    return lax.fori_loop(0, (end - start + tile - 1) // tile, run, carry)


def _of_expert(kernels: _Kernels, expert: jax.Array) -> _Kernels:
    # Called outside the loop over tiles, where XLA would copy the kernels in every iteration.
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), kernels)


def _inner(x: jax.Array, kernels: _Kernels) -> tuple[jax.Array | None, jax.Array]:
    return None if kernels.gate is None else x @ kernels.gate, x @ kernels.up


def _zeros(shape: tuple[int, ...], reference: jax.Array) -> jax.Array:
    return mark_varying(jnp.zeros(shape, jnp.float32), compat.varying_axes(reference))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _grouped(
    x: jax.Array, weights: jax.Array, kernels: _Kernels, groups: _Groups, activation: Mlp, tile: int
) -> jax.Array:
    flat = weights.reshape(-1)

    def of_expert(expert: jax.Array, y: jax.Array) -> jax.Array:
        expert_kernels = _of_expert(kernels, expert)

        def of_tile(of: _Tile, y: jax.Array) -> jax.Array:
            h = activated(activation, *_inner(_rows(x, of), expert_kernels))
            out = jnp.matmul(h, expert_kernels.down, preferred_element_type=jnp.float32)
            return y.at[of.tokens].add(out * flat[of.numbers][:, None], mode="drop")

        return _over_tiles(groups, expert, weights.shape, tile, of_tile, y)

    y = lax.fori_loop(0, kernels.up.shape[0], of_expert, _zeros(x.shape, x))
    return y.astype(x.dtype)


def _rows(x: jax.Array, of: _Tile) -> jax.Array:
    return x.at[of.tokens].get(mode="fill", fill_value=0)


def _backward(activation: Mlp, tile: int, residuals: _Operands, dy: jax.Array) -> tuple[object, ...]:
    x, weights, kernels, groups = residuals
    flat = weights.reshape(-1)

    def of_expert(expert: jax.Array, sums: _Gradients) -> _Gradients:
        expert_kernels = _of_expert(kernels, expert)

        def of_tile(of: _Tile, sums: _Gradients) -> _Gradients:
            dx, dweights, dkernels = sums
            rows, dout = _rows(x, of), _rows(dy, of)
            h, pull = jax.vjp(partial(activated, activation), *_inner(rows, expert_kernels))
            dh = dout @ expert_kernels.down.T  # gradient of the unweighted output, shared by h and the weight
            dweight = jnp.where(of.valid, jnp.sum(dh.astype(jnp.float32) * h.astype(jnp.float32), -1), 0.0)
            weight = jnp.where(of.valid, flat[of.numbers], 0.0)[:, None].astype(x.dtype)
            dgate, dup = pull(dh * weight)
            drows = jnp.matmul(dup, expert_kernels.up.T, preferred_element_type=jnp.float32)
            if expert_kernels.gate is not None:
                drows += jnp.matmul(dgate, expert_kernels.gate.T, preferred_element_type=jnp.float32)
            grads = _Kernels(
                None if expert_kernels.gate is None else _product(rows, dgate),
                _product(rows, dup),
                _product(h, dout * weight),
            )
            return (
                dx.at[of.tokens].add(drows, mode="drop"),
                dweights.at[of.numbers].add(dweight),
                jax.tree.map(jnp.add, dkernels, grads),
            )

        dx, dweights, dkernels = sums
        zeros = jax.tree.map(lambda w: _zeros(w.shape, w), expert_kernels)
        dx, dweights, grads = _over_tiles(groups, expert, weights.shape, tile, of_tile, (dx, dweights, zeros))
        written = jax.tree.map(
            lambda full, grad: lax.dynamic_update_index_in_dim(full, grad.astype(full.dtype), expert, 0),
            dkernels,
            grads,
        )
        return dx, dweights, written

    start = (_zeros(x.shape, x), _zeros(flat.shape, flat), jax.tree.map(jnp.zeros_like, kernels))
    dx, dweights, dkernels = lax.fori_loop(0, kernels.up.shape[0], of_expert, start)
    unused = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), groups)
    return dx.astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype), dkernels, unused


def _product(rows: jax.Array, grad: jax.Array) -> jax.Array:
    return jnp.matmul(rows.T, grad, preferred_element_type=jnp.float32)


_grouped.defvjp(lambda *args: (_grouped(*args), args[:4]), _backward)
