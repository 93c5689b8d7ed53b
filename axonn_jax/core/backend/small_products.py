"""Workaround for sums over matmuls of inner size 3, some of which jaxlib 0.10.2 miscompiles on CPUs.

If a matmul [3, 3] @ [3, columns] and a sum over its rows share a kernel, columns beyond the 32,768th are wrong.
"""

import functools
from collections.abc import Callable, Hashable
from math import prod
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from axonn_jax.core.backend.compiler_options import supported_options
from axonn_jax.core.backend.jaxprs import equations
from axonn_jax.core.backend.traits import computes_on_cores

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CONTRACTED, _RIGHT = 3, 32_768
_UNFUSED_DOT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""Compiler options that put matmuls into separate kernels, without the sums that read them."""


def product_options(jaxpr: Jaxpr) -> dict[str, object]:
    """Return the compiler options that a traced program needs, empty if it is not affected.

    Args:
        jaxpr: The program.
    """
    # Check the program before the backend: the check of the backend compiles and runs one itself.
    return supported_options(_UNFUSED_DOT) if any(map(_at_risk, equations(jaxpr))) and sums_are_wrong() else {}


def compile_traced(traced: jax.stages.Traced) -> jax.stages.Compiled:
    """Compile a traced program with the `product_options` that it needs."""
    return traced.lower().compile(product_options(traced.jaxpr.jaxpr) or None)  # type: ignore[no-any-return]


def jitted(f: Callable[[*Ts], T], **jit_options: Any) -> Callable[[*Ts], T]:
    """Return `jax.jit(f, **jit_options)` with the `product_options` that each of its programs needs."""
    plain = jax.jit(f, **jit_options)
    compiled = dict[Hashable, Callable[..., T]]()

    def run(*args: *Ts) -> T:
        if (form := form_of(args)) not in compiled:
            options = product_options(plain.trace(*args).jaxpr.jaxpr)
            compiled[form] = jax.jit(f, compiler_options=options, **jit_options) if options else plain
        return compiled[form](*args)

    return run


def form_of(args: object) -> Hashable:
    """Return the structure, shapes and dtypes of a tree of arrays, which identify a compiled program."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@functools.cache
def sums_are_wrong() -> bool:
    """Return whether the backend miscompiles these sums, found by computing one in 0.1 s."""
    if not computes_on_cores(jax.default_backend()):
        return False
    rows, unit = np.zeros((_RIGHT + 1, _CONTRACTED), np.float32), np.eye(_CONTRACTED, dtype=np.float32)
    rows[-1] = 1.0
    sums = jax.jit(jax.vmap(lambda unit, row: jnp.sum(jnp.square(unit @ row)), (None, 0)))(unit, rows)
    return bool(sums[-1] != _CONTRACTED)


def _at_risk(eqn: Any) -> bool:
    """Return whether an equation is a matmul of inner size 3, with more results than are computed correctly."""
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    size = prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    return bool(size == _CONTRACTED and eqn.outvars[0].aval.size > _RIGHT)
