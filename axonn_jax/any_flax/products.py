"""Products of a layer's input with its kernel, in the form that XLA's CPU backend computes fastest."""

from functools import partial
from math import prod
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn


def multiplies_rows(eqn: JaxprEqn) -> bool:
    """Return whether an equation multiplies the last axis of an array [..., k] with a float32 matrix."""
    if eqn.primitive.name != "dot_general":
        return False
    x, w, y = (cast("jax.ShapeDtypeStruct", atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    contracted, batch = eqn.params["dimension_numbers"]
    floats = {x.dtype, w.dtype, y.dtype} == {jnp.dtype("float32")}
    plain = contracted in (((x.ndim - 1,), (0,)), ((x.ndim - 1,), (1,))) and batch == ((), ())
    return bool(plain and floats and w.ndim == 2 and x.ndim > 1 and prod(x.shape[:-1]) > 1)


def flat_product(eqn: JaxprEqn, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the product as one of matrices: with more axes XLA leaves it to a slow loop."""
    (_, (over,)), _ = eqn.params["dimension_numbers"]
    y = _product(x.reshape(-1, x.shape[-1]), w, over == 1, eqn.params["precision"])
    return y.reshape(*x.shape[:-1], y.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: jax.Array, w: jax.Array, turned: bool, precision: lax.PrecisionLike) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1 if turned else 0,)), ((), ())), precision)


def _backward(
    turned: bool, precision: lax.PrecisionLike, residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    dx = lax.dot_general(dy, w, (((1,), (0 if turned else 1,)), ((), ())), precision)
    left, right = (dy, x) if turned else (x, dy)
    return dx, lax.dot_general(_transposed(left), right, (((1,), (0,)), ((), ())), precision)


_product.defvjp(lambda x, w, *static: (_product(x, w, *static), (x, w)), _backward)


def _transposed(x: jax.Array) -> jax.Array:
    # Without a branch XLA would merge the transpose with what computes `x`, and with the product, which it then leaves
    # to a slow loop. The condition always holds: of two numbers `fmin` returns the one that is not NaN.
    always = jnp.fmin(jnp.abs(x[0, 0]), 0) == 0
    return lax.cond(always, jnp.transpose, lambda x: jnp.zeros(x.shape[::-1], x.dtype), x)  # type: ignore[no-any-return]
