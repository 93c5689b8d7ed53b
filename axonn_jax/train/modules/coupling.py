"""Numbers computed from all rows that a traced loss uses beside them: in parts of the rows they may be others."""

from collections.abc import Sequence
from typing import Any

from axonn_jax.backend.jaxprs import bodies, follow


def couples_rows(jaxpr: Any, of_rows: Sequence[bool]) -> bool:
    """True if a loss divides by one number that it computes from rows, chooses or repeats by one, or spreads one over
    an array.

    Such are the sum of a mask, and the mean that advantages are measured from.

    `of_rows` says of the inputs that they are rows.
    """
    coupled = False

    def through(eqn: Any, arrive: list[bool]) -> list[bool]:
        """Return True for each result of an equation that depends on rows."""
        nonlocal coupled
        kind, leave = eqn.primitive.name, [any(arrive)] * len(eqn.outvars)
        numbers = [var.aval.shape == () and of_rows for var, of_rows in zip(eqn.invars, arrive, strict=True)]
        coupled |= kind in _BY and numbers[_BY[kind]]
        coupled |= any(numbers) and not list(bodies(eqn)) and any(var.aval.size > 1 for var in eqn.outvars)
        if kind == "while" and any(arrive):
            return loop(eqn.params, arrive)
        for body in bodies(eqn) if any(arrive) else ():
            width = len(body.invars)  # a branch has no place for its index
            out = follow(
                body, arrive[len(arrive) - width :] if width <= len(arrive) else [True] * width, False, through
            )
            if width == len(arrive) and len(out) == len(leave) and kind != "scan":
                leave = out
        return leave

    def loop(params: Any, arrive: list[bool]) -> list[bool]:
        """Return True for each result of a loop that depends on rows; how often it runs must not."""
        nonlocal coupled
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        before, carry = None, arrive[second:]
        while before != carry:
            out = follow(params["body_jaxpr"].jaxpr, arrive[first:second] + carry, False, through)
            before, carry = carry, [a or b for a, b in zip(carry, out, strict=True)]
        coupled |= follow(params["cond_jaxpr"].jaxpr, arrive[:first] + carry, False, through)[0]
        return carry

    follow(jaxpr, of_rows, False, through)
    return coupled


_BY = {"div": 1, "cond": 0, "select_n": 0}
"""Operand that must not depend on all rows, by primitive."""
