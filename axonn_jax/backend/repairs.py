"""Repairs of what XLA does to a program (jaxlib 0.10.2 to 0.12), most of them of its CPU backend alone."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from axonn_jax.backend.traits import computes_on_cores

# `x` as it is, computed after `earlier`. A primitive of its own because the result varies over the mesh axes that `x`
# varies over, independent of `earlier`.
_tie = Primitive("tie")
_tie.def_abstract_eval(lambda x, earlier: x)
_tie.def_impl(lambda x, earlier: x)
ad.primitive_jvps[_tie] = lambda primals, tangents: (after(*primals), tangents[0])
batching.primitive_batchers[_tie] = lambda operands, dims: (after(*operands), dims[0])


def _barrier(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """Return `x` behind a barrier, without computation or copy: XLA's GPU backend drops barriers after scheduling.

    `jax.experimental.control_deps` does not compile there (no GPU pipeline of jax 0.10.2 to 0.12 rewrites them).
    """
    return lax.optimization_barrier((x, earlier))[0]


def _added_zero(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """Return `x` plus zero times `earlier`, as the CPU backend drops barriers before scheduling; `fmin` drops NaN."""
    return x + jnp.fmin(jnp.abs(earlier.ravel()[0]), 0).astype(x.dtype)


mlir.register_lowering(_tie, mlir.lower_fun(_barrier, multiple_results=False))
mlir.register_lowering(_tie, mlir.lower_fun(_added_zero, multiple_results=False), platform="cpu")


def after(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """Return `x`, to be computed after `earlier`."""
    return _tie.bind(x, earlier)  # type: ignore[no-any-return]


def reduce_scatter(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """Sum over mesh axes and keep this device's part along `dim`, as tiled `lax.psum_scatter`; in a manual region.

    Bytes a device on a ring: `(G-1)/G * size * itemsize`. Between processes XLA's CPU backend sums by gloo, which
    overwrites parts of some MiB before they are sent (jax issue 40830: 3 of 120 sums of 30 MB were wrong, with no
    error). There it is an all-to-all, of the same bytes, and a sum on each device.
    """
    if not (jax.distributed.is_initialized() and computes_on_cores(jax.default_backend())):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    size = prod(lax.axis_size(axis) for axis in ((axes,) if isinstance(axes, str) else axes))
    moved = lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
    parts = moved.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return parts.sum(dim, dtype=x.dtype)


def over_rows(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a function of [rows, features] to [..., features]; batched operands cost CPUs a tenth of a step."""
    y = f(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def write_apart(write: Callable[..., jax.Array], always: jax.Array) -> Callable[..., jax.Array]:
    """Return `write(array, values)` as an operation that XLA fuses with no reader of its result; `always` is true.

    The CPU compiler would write the values once more for the product that reads them, in a copy of the array.
    """

    def apart(array: jax.Array, values: jax.Array) -> jax.Array:
        return lax.cond(always, write, lambda array, _: array, array, values)

    return partial(lax.platform_dependent, cpu=apart, default=write)


def on_cores(cores: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `cores` in programs for CPUs, and `others` in all other programs."""
    return partial(lax.platform_dependent, cpu=cores, default=others)
