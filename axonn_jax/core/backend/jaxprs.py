"""Iteration over the equations of traced programs and their inner programs, and forward dataflow through them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from sysconfig import get_path
from typing import Any, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn

Value = TypeVar("Value")


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs that an equation runs."""
    for param in eqn.params.values():
        for value in param if isinstance(param, tuple | list) else (param,):
            inner: Any = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield inner


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and, recursively, of all jaxprs that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from equations(inner)


def same_body(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the body of an equation whose inputs and results are the equation's own, if any.

    Among these equations are jit, remat, scan and custom derivatives.
    """
    sizes = (len(eqn.invars), len(eqn.outvars))
    return next((body for body in bodies(eqn) if (len(body.invars), len(body.outvars)) == sizes), None)


def scan_sizes(eqn: JaxprEqn, body: Jaxpr) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of its carried values.

    Args:
        eqn: The scan.
        body: Its body.
    """

    # Count inputs and results of equal rank: the body sees stacks as slices. The equation's parameters hold the same
    # numbers, but under names that change between jax versions.
    def same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))

    carried = same_rank(eqn.outvars, body.outvars)
    return same_rank(eqn.invars, body.invars) - carried, carried


def follow(
    jaxpr: Jaxpr, inputs: Sequence[Value], default: Value, transfer: Callable[[JaxprEqn, list[Value]], Sequence[Value]]
) -> list[Value]:
    """Propagate a value per variable forward through a jaxpr.

    Args:
        jaxpr: The program.
        inputs: Values of its inputs.
        default: Value of literals and constants.
        transfer: Function from an equation and the values of its inputs to the values of its results.

    Returns:
        Values of the program's results.
    """
    env = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> Value:
        return default if hasattr(var, "val") else env.get(var, default)  # a literal is not hashable

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, transfer(eqn, [read(var) for var in eqn.invars]), strict=True))
    return [read(var) for var in jaxpr.outvars]


def users_line(eqn: Any) -> str:
    """Return the file and line of user code that an equation comes from; "" if there is only library code."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


_LIBRARIES = (str(Path(__file__).parents[2]), get_path("stdlib"), get_path("purelib"))
"""Path prefixes of library code, as opposed to the user's."""
