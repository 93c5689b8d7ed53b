"""Max pooling by elementwise maxima of slices, whose gradient is many times faster on XLA's CPU backend."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from axonn_jax.core.backend.traits import pools_slowly
from axonn_jax.core.compat import ClosedJaxpr


def with_sliced_pooling(f: Callable[..., Any]) -> Callable[..., Any]:
    """Replace max pooling over disjoint windows by maxima of slices, on CPUs.

    Values and gradients do not change: among equal numbers, the first one in a window gets the gradient. Pooling inside
    an inner program (`jax.jit`, `jax.checkpoint`, `lax.scan`) is not replaced.

    Args:
        f: Function of arrays.

    Returns:
        The function with its pooling replaced, or `f` itself on other backends.
    """
    if not pools_slowly(jax.default_backend()):
        return f

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _results(closed, jax.tree.leaves(args)))

    return run


def _results(closed: ClosedJaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Evaluate a program up to its first pooling, the pooling by slices, and then the remaining program recursively."""
    jaxpr = closed.jaxpr
    at = next((at for at, eqn in enumerate(jaxpr.eqns) if _pools_disjoint_windows(eqn)), None)
    if at is None:
        return list(jaxpr_as_fun(closed)(*args))
    head_eqns, pool, tail_eqns = jaxpr.eqns[:at], jaxpr.eqns[at], jaxpr.eqns[at + 1 :]
    # Pass on only the values that the tail reads: the others may be freed.
    read = {v for v in [*jaxpr.outvars, *(v for eqn in tail_eqns for v in eqn.invars)] if isinstance(v, Var)}
    head_outputs = [v for eqn in head_eqns for v in eqn.outvars if v in read]
    live_inputs = {v: value for v, value in zip(jaxpr.invars, args, strict=True) if v in read}
    head = jaxpr.replace(outvars=[*head_outputs, pool.invars[0]], eqns=head_eqns)
    tail = jaxpr.replace(invars=[*head_outputs, *live_inputs, pool.outvars[0]], eqns=tail_eqns)
    *values, x = jaxpr_as_fun(ClosedJaxpr(head, closed.consts))(*args)
    largest = _largest(x, pool.params["window_dimensions"])
    return _results(ClosedJaxpr(tail, closed.consts), [*values, *live_inputs.values(), largest])


def _pools_disjoint_windows(eqn: JaxprEqn) -> bool:
    """Return whether an equation is max pooling over disjoint windows, without padding or gaps between them."""
    if eqn.primitive.name != "reduce_window_max":
        return False
    params, windows = eqn.params, eqn.params["window_dimensions"]
    disjoint = params["window_strides"] == windows and not any(map(any, params["padding"]))
    return bool(disjoint and {*params["base_dilation"], *params["window_dilation"]} == {1})


def _largest(x: jax.Array, windows: Sequence[int]) -> jax.Array:
    """Return the maximum of every window.

    The last axis is reduced first, so that the first of equal numbers in row-major order wins, as it does in XLA.
    """
    for axis, size in reversed([*enumerate(windows)]):
        end = x.shape[axis] // size * size
        slices = [lax.slice_in_dim(x, first, end, size, axis) for first in range(size)]
        x = reduce(lambda a, b: jnp.where((a >= b) | (a != a), a, b), slices)  # a != a propagates NaN
    return x
