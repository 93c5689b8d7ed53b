"""Maxima over windows as maxima of slices, whose gradient XLA's CPU backend computes many times faster."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from axonn_jax.backend.traits import pools_slowly
from axonn_jax.compat import ClosedJaxpr


def with_sliced_pooling(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with its maxima over windows that do not overlap taken of slices, in programs for CPUs.

    Values and gradients stay the same: of equal numbers the first one in a window gets the gradient. A window inside of
    a call that was traced by itself (`jax.jit`, `jax.checkpoint`, `lax.scan`) stays as it is. `f` takes arrays.
    """
    if not pools_slowly(jax.default_backend()):
        return f

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _results(closed, jax.tree.leaves(args)))

    return run


def _results(closed: ClosedJaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Run what is before the first such maximum, the maximum, and what is behind it."""
    jaxpr = closed.jaxpr
    at = next((at for at, eqn in enumerate(jaxpr.eqns) if _in_windows_apart(eqn)), None)
    if at is None:
        return list(jaxpr_as_fun(closed)(*args))
    before, pool, behind = jaxpr.eqns[:at], jaxpr.eqns[at], jaxpr.eqns[at + 1 :]
    read = {v for v in [*jaxpr.outvars, *(v for eqn in behind for v in eqn.invars)] if isinstance(v, Var)}
    made = [v for eqn in before for v in eqn.outvars if v in read]
    given = {v: value for v, value in zip(jaxpr.invars, args, strict=True) if v in read}
    head = jaxpr.replace(outvars=[*made, pool.invars[0]], eqns=before)
    tail = jaxpr.replace(invars=[*made, *given, pool.outvars[0]], eqns=behind)
    *values, x = jaxpr_as_fun(ClosedJaxpr(head, closed.consts))(*args)
    largest = _largest(x, pool.params["window_dimensions"])
    return _results(ClosedJaxpr(tail, closed.consts), [*values, *given.values(), largest])


def _in_windows_apart(eqn: JaxprEqn) -> bool:
    """True for a maximum over windows without padding that touch and do not overlap."""
    if eqn.primitive.name != "reduce_window_max":
        return False
    params, windows = eqn.params, eqn.params["window_dimensions"]
    apart = params["window_strides"] == windows and not any(map(any, params["padding"]))
    return bool(apart and {*params["base_dilation"], *params["window_dilation"]} == {1})


def _largest(x: jax.Array, windows: Sequence[int]) -> jax.Array:
    """Maximum of each window, of the last axis first: so the first of equal numbers is kept, as XLA keeps it."""
    for axis, size in reversed([*enumerate(windows)]):
        end = x.shape[axis] // size * size
        slices = [lax.slice_in_dim(x, first, end, size, axis) for first in range(size)]
        x = reduce(lambda a, b: jnp.where((a >= b) | (a != a), a, b), slices)  # NaN stays
    return x
