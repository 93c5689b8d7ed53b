"""Divisors of a traced loss: a mean over what a mask leaves is one number in parts of the rows and another in all."""

from collections.abc import Sequence
from typing import Any

from axonn_jax.tensor.parallelize.convolution import bodies


def divides_by_rows(jaxpr: Any, of_rows: Sequence[bool]) -> bool:
    """True if a loss divides by a single number that it computes from rows, as the sum of a mask.

    `of_rows` says of the inputs that they are rows.
    """
    return _follow(jaxpr, of_rows)[0]


def _follow(jaxpr: Any, of_rows: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Return whether there is such a division, and of each output whether it depends on rows."""
    known, found = dict(zip(jaxpr.invars, of_rows, strict=True)), False

    def depends(var: Any) -> bool:
        return not hasattr(var, "val") and known.get(var, False)  # a literal has a value and is not hashable

    for eqn in jaxpr.eqns:
        arrive = [depends(var) for var in eqn.invars]
        leave = [any(arrive)] * len(eqn.outvars)
        if eqn.primitive.name == "div":
            found |= arrive[1] and eqn.invars[1].aval.shape == ()
        for body in bodies(eqn) if any(arrive) else ():
            some = len(body.invars)  # a branch has no place for its index
            inner = arrive[len(arrive) - some :] if some <= len(arrive) else [True] * some
            divides, out = _follow(body, inner)
            found |= divides
            if len(body.invars) == len(arrive) and len(out) == len(leave) and eqn.primitive.name != "scan":
                leave = out
        known.update(zip(eqn.outvars, leave, strict=True))
    return found, [depends(var) for var in jaxpr.outvars]
