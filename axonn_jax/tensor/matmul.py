"""Matmuls on one device, of a few tokens as the transposed product where that is faster."""

import jax
from jax import lax


def matmul(x: jax.Array, w: jax.Array, *, turned: bool = False, few: int = 0) -> jax.Array:
    """`Y = X W` on one device, [rows, k] and [k, n] (held as [n, k] if `turned`) -> [rows, n]; no collectives.

    Up to `few` rows are computed as the transposed product `W^T X^T`.
    """
    over = 1 if turned else 0
    if x.shape[0] > few:
        return lax.dot_general(x, w, (((1,), (over,)), ((), ())))
    # Behind a barrier: XLA would move the transposition to the other side of the product.
    return lax.optimization_barrier(lax.dot_general(w, x, (((over,), (1,)), ((), ())))).T
