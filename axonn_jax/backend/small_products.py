"""Sums over products of three numbers, of which jaxlib 0.10.2 gets some wrong on CPUs, compiled so that they are right.

In a product [3, 3] @ [3, columns] with a sum over the rows in the same kernel, columns behind the 32,768th are wrong.
"""

import functools
from collections.abc import Callable, Hashable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.backend.compiler_options import known_options
from axonn_jax.backend.jaxprs import equations
from axonn_jax.backend.traits import computes_on_cores

_CONTRACTED, _RIGHT = 3, 32_768
_APART = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""Products in kernels of their own, without the sum behind them."""


def product_options(jaxpr: Any) -> dict[str, Any]:
    """XLA's compiler options of a traced program: none unless it has such products and this XLA gets them wrong."""
    return known_options(_APART) if any(map(_at_risk, equations(jaxpr))) and sums_are_wrong() else {}


def compile_traced(traced: Any) -> jax.stages.Compiled:
    """Return a traced program, compiled with its `product_options`."""
    return traced.lower().compile(product_options(traced.jaxpr.jaxpr) or None)  # type: ignore[no-any-return]


def jitted(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Return `jax.jit(f, **how)`, each program of which has its `product_options`."""
    plain = jax.jit(f, **how)
    chosen = dict[Hashable, Callable[..., Any]]()

    def run(*given: Any) -> Any:
        if (form := form_of(given)) not in chosen:
            options = product_options(plain.trace(*given).jaxpr.jaxpr)
            chosen[form] = jax.jit(f, compiler_options=options, **how) if options else plain
        return chosen[form](*given)

    return run


def form_of(given: Any) -> Hashable:
    """Return the structure, shapes and types of arrays, for each of which there is one program."""
    leaves, structure = jax.tree.flatten(given)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@functools.cache
def sums_are_wrong() -> bool:
    """True if a sum of squares over such products is wrong, found by computing one in 0.1 s."""
    if not computes_on_cores(jax.default_backend()):
        return False
    rows, unit = np.zeros((_RIGHT + 1, _CONTRACTED), np.float32), np.eye(_CONTRACTED, dtype=np.float32)
    rows[-1] = 1.0
    sums = jax.jit(jax.vmap(lambda unit, row: jnp.sum(jnp.square(unit @ row)), (None, 0)))(unit, rows)
    return bool(sums[-1] != _CONTRACTED)


def _at_risk(eqn: Any) -> bool:
    """True for a matrix product over three numbers with more results than XLA gets right."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    size = prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return bool(size == _CONTRACTED and eqn.outvars[0].aval.size > _RIGHT)
