"""Check of custom derivative rules, which may couple rows even if the function itself does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from axonn_jax.any_flax.dependence.row_loops import Value, Values
from axonn_jax.any_flax.dependence.row_types import (
    NO_AXES,
    Divisor,
    Fault,
    Rows,
    RowType,
    Same,
    Sum,
    coupled,
    unknown,
)
from axonn_jax.core import compat

_COTANGENT = Divisor("cotangent", counts=False)
"""Symbolic divisor of every cotangent: a gradient must be linear in it, like the part's share of the mean."""


def derivative_fault(
    eqn: Any, other: Any, operands: Values, results: Values, run: Callable[..., Values], name: Callable[..., int]
) -> Fault | None:
    """Return the fault of a custom derivative rule that couples rows, or None.

    Cotangents are those of a mean: in a part they are larger by the number of parts, so a rule that is not linear in
    them, for example because it clips them, computes different gradients.

    Args:
        eqn: The call in the program of all rows.
        other: The call in the program of a part.
        operands: Values of the call's operands.
        results: Values of its results.
        run: Function that types a pair of programs (`Walk.run`).
        name: Function that numbers values (`Walk.name`).
    """
    if not any(isinstance(operand.type, Rows | Sum) for operand in (*operands, *results)):
        return None
    try:
        (full, inputs, floats), (part, _, _) = _trace_vjp(eqn), _trace_vjp(other)
    except Exception:  # user code may raise anything, and will raise it again when the loss is differentiated
        return unknown("a derivative of its own that is not traced")
    value_of = dict(zip((id(var) for var in eqn.invars), operands, strict=True))
    values = [value_of[id(var)] for var in inputs]
    moving = [values[at] for at in floats]
    for value, var in zip(results, eqn.outvars, strict=True):
        if jnp.issubdtype(var.aval.dtype, jnp.inexact):
            kind: RowType = Sum(-1.0, _COTANGENT)
            if isinstance(value.type, Rows):
                kind = replace(value.type, degree=-1.0, divisor=_COTANGENT, columns=NO_AXES)
            values.append(Value(kind, name("cotangent", id(var)), True))
    pulled = run(full, part, values)
    for value, gradient in zip(moving, pulled, strict=True):
        kind = gradient.type
        if isinstance(kind, Fault):
            return replace(kind, reason=f"{kind.reason}, in the backward pass")
        zero = isinstance(kind, Same) and kind.value == 0
        linear = isinstance(kind, Rows | Sum) and kind.divisor == _COTANGENT
        rows = isinstance(kind, Rows) or not isinstance(value.type, Rows)
        if not zero and not (linear and rows):
            return coupled("a backward pass that is no sum over rows")
    return None


def _trace_vjp(eqn: Any) -> tuple[ClosedJaxpr, list[Any], list[int]]:
    """Trace the vjp of a call as a program of its inputs and the cotangents of its floating-point results.

    Returns:
        The program, its input variables, and the positions of the floating-point inputs, which get cotangents.
    """
    function = compat.function_of(eqn)
    # A variable that is passed twice is one input, so that its cotangents are summed before they are checked.
    variables = list(dict.fromkeys(var for var in eqn.invars if not hasattr(var, "val")))
    inputs, outputs = (
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in value] for value in (variables, eqn.outvars)
    )
    floats = [at for at, value in enumerate(inputs) if jnp.issubdtype(value.dtype, jnp.inexact)]
    reals = [at for at, value in enumerate(outputs) if jnp.issubdtype(value.dtype, jnp.inexact)]

    def pulled(values: list[Any], cotangents: list[Any]) -> Any:
        def run(moving: list[Any]) -> Any:
            moved = dict(zip(floats, moving, strict=True))
            results = function(*(moved.get(at, value) for at, value in enumerate(values)))
            return [results[at] for at in reals]

        return jax.vjp(run, [values[at] for at in floats])[1](cotangents)[0]

    return jax.make_jaxpr(pulled)(inputs, [outputs[at] for at in reals]), variables, floats
