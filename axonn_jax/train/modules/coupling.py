"""Numbers computed from all rows that a traced loss uses beside them: in parts of the rows they may be others."""

from collections.abc import Sequence
from typing import Any

from axonn_jax.backend.jaxprs import bodies


def couples_rows(jaxpr: Any, of_rows: Sequence[bool]) -> bool:
    """True if a loss divides by one number that it computes from rows, chooses or repeats by one, or spreads one over
    an array.

    Such are the sum of a mask, and the mean that advantages are measured from.

    `of_rows` says of the inputs that they are rows.
    """
    return _follow(jaxpr, of_rows)[0]


def _follow(jaxpr: Any, of_rows: Sequence[bool]) -> tuple[bool, list[bool]]:
    """Return whether there is such a number, and of each output whether it depends on rows."""
    known, coupled = dict(zip(jaxpr.invars, of_rows, strict=True)), False

    def depends(var: Any) -> bool:
        return not hasattr(var, "val") and known.get(var, False)  # a literal has a value and is not hashable

    for eqn in jaxpr.eqns:
        arrive, kind = [depends(var) for var in eqn.invars], eqn.primitive.name
        leave = [any(arrive)] * len(eqn.outvars)
        numbers = [var.aval.shape == () and of_rows for var, of_rows in zip(eqn.invars, arrive, strict=True)]
        coupled |= kind in _BY and numbers[_BY[kind]]
        coupled |= any(numbers) and not list(bodies(eqn)) and any(var.aval.size > 1 for var in eqn.outvars)
        if kind == "while" and any(arrive):
            couples, leave = _loop(eqn.params, arrive)
            coupled |= couples
            known.update(zip(eqn.outvars, leave, strict=True))
            continue
        for body in bodies(eqn) if any(arrive) else ():
            width = len(body.invars)  # a branch has no place for its index
            inner = arrive[len(arrive) - width :] if width <= len(arrive) else [True] * width
            couples, out = _follow(body, inner)
            coupled |= couples
            if width == len(arrive) and len(out) == len(leave) and kind != "scan":
                leave = out
        known.update(zip(eqn.outvars, leave, strict=True))
    return coupled, [depends(var) for var in jaxpr.outvars]


def _loop(params: Any, arrive: list[bool]) -> tuple[bool, list[bool]]:
    """Return whether rows decide how often a loop runs, or meet in it, and of each output if it depends on rows."""
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = arrive[second:]
    while True:
        couples, out = _follow(params["body_jaxpr"].jaxpr, arrive[first:second] + carry)
        if carry == (carry := [a or b for a, b in zip(carry, out, strict=True)]):
            break
    return couples or _follow(params["cond_jaxpr"].jaxpr, arrive[:first] + carry)[1][0], carry


_BY = {"div": 1, "cond": 0, "select_n": 0}
"""Operand that must not depend on all rows, by primitive."""
