"""Matmul on one device, computed as a transposed product for a few tokens where that is faster."""

import jax
from jax import lax


def matmul(x: jax.Array, w: jax.Array, *, turned: bool = False, transpose_limit: int = 0) -> jax.Array:
    """Compute `Y = X W` on one device, [rows, k] and [k, n] (stored as [n, k] if `turned`) -> [rows, n].

    No collectives. Up to `transpose_limit` rows are computed as the transposed product `W^T X^T`.
    """
    over = 1 if turned else 0
    if x.shape[0] > transpose_limit:
        return lax.dot_general(x, w, (((1,), (over,)), ((), ())))
    # Without the barrier, XLA would move the transpose back to the other side of the product.
    return lax.optimization_barrier(lax.dot_general(w, x, (((over,), (1,)), ((), ())))).T
