"""Workarounds for XLA (jaxlib 0.10.2 to 0.12), most of them for its CPU backend only."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from axonn_jax.core.backend.traits import computes_on_cores

T = TypeVar("T")

# Identity on `x`, computed after `earlier`. It is a primitive because its result varies over the mesh axes of `x` only,
# whatever axes `earlier` varies over.
_tie = Primitive("tie")
_tie.def_abstract_eval(lambda x, earlier: x)
_tie.def_impl(lambda x, earlier: x)
ad.primitive_jvps[_tie] = lambda primals, tangents: (depend_on(*primals), tangents[0])
batching.primitive_batchers[_tie] = lambda operands, dims: (depend_on(*operands), dims[0])


def _barrier(x: jax.Array, earlier: jax.Array) -> jax.Array:
    # A barrier costs no computation or copy, because XLA's GPU backend drops barriers only after scheduling.
    # `jax.experimental.control_deps` does not compile there: no GPU pipeline of jax 0.10.2 to 0.12 rewrites them.
    return lax.optimization_barrier((x, earlier))[0]


def _added_zero(x: jax.Array, earlier: jax.Array) -> jax.Array:
    # The CPU backend drops barriers before scheduling, so depend on a 0 computed from `earlier`: of two numbers `fmin`
    # returns the one that is not NaN, so the sum stays `x` for every value.
    return x + jnp.fmin(jnp.abs(earlier.ravel()[0]), 0).astype(x.dtype)


mlir.register_lowering(_tie, mlir.lower_fun(_barrier, multiple_results=False))
mlir.register_lowering(_tie, mlir.lower_fun(_added_zero, multiple_results=False), platform="cpu")


def depend_on(x: jax.Array, earlier: jax.Array) -> jax.Array:
    """Return `x` unchanged, scheduled after `earlier`.

    Args:
        x: An array.
        earlier: An array that must be computed first.
    """
    return _tie.bind(x, earlier)  # type: ignore[no-any-return]


def reduce_scatter(x: jax.Array, axes: str | Sequence[str], dim: int) -> jax.Array:
    """Reduce-scatter an array in a manual region, like a tiled `lax.psum_scatter`.

    One reduce-scatter of `(G-1)/G * size * itemsize` bytes per device on a ring; between processes on CPUs, an
    all-to-all of as many bytes.

    Args:
        x: The array to sum.
        axes: Mesh axes to sum over, with `G` devices.
        dim: Dimension along which every device keeps its part of the sum.
    """
    # Between processes XLA's CPU backend reduces with gloo, which overwrites parts of some MiB before they are sent: 3
    # of 120 sums of 30 MB were wrong, without an error (jax issue 40830). An all-to-all and a local sum avoid it.
    if not (jax.distributed.is_initialized() and computes_on_cores(jax.default_backend())):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    size = prod(lax.axis_size(axis) for axis in ((axes,) if isinstance(axes, str) else axes))
    moved = lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
    parts = moved.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return parts.sum(dim, dtype=x.dtype)


def over_rows(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Apply a function of [rows, features] to an array [..., features].

    Matmuls of batched operands would take a tenth of a step longer on CPUs.

    Args:
        f: Function of a matrix.
        x: The array.
    """
    y = f(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def unfused_write(write: Callable[..., jax.Array], always: jax.Array) -> Callable[..., jax.Array]:
    """Keep XLA's CPU backend from fusing a write to an array with readers of the result.

    When fused with a matmul that reads the array, the write would be repeated there, in a copy of the array.

    Args:
        write: Function of (array, values) that returns the array with the values written.
        always: A scalar that is true, but not known to be at compile time.
    """

    def on_cpu(array: jax.Array, values: jax.Array) -> jax.Array:
        return lax.cond(always, write, lambda array, _: array, array, values)

    return partial(lax.platform_dependent, cpu=on_cpu, default=write)


def on_cores(cores: Callable[..., T], fallback: Callable[..., T]) -> Callable[..., T]:
    """Return a function that runs `cores` in programs for CPUs, and `fallback` in all other programs."""
    return partial(lax.platform_dependent, cpu=cores, default=fallback)
