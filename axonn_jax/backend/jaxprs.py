"""Equations of traced programs, those of inner programs included, and values carried through them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from sysconfig import get_path
from typing import Any, TypeVar

Value = TypeVar("Value")


def bodies(eqn: Any) -> Iterator[Any]:
    """Return the jaxprs run by an equation."""
    for param in eqn.params.values():
        for each in param if isinstance(param, tuple | list) else (param,):
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def equations(jaxpr: Any) -> Iterator[Any]:
    """Return the equations of a jaxpr and of all jaxprs that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from equations(inner)


def same_body(eqn: Any) -> Any | None:
    """Return the body of an equation (jit, remat, scan, a custom derivative) that takes and gives the same values."""
    sizes = (len(eqn.invars), len(eqn.outvars))
    return next((body for body in bodies(eqn) if (len(body.invars), len(body.outvars)) == sizes), None)


def scan_sizes(eqn: Any, body: Any) -> tuple[int, int]:
    """Return the numbers of a scan's constants and of its carried values, which its body has in the same shape.

    Its other inputs and results are stacks, of which the body has slices. Parameters of the equation that say the same
    have other names from one jax to the next.
    """

    def alike(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outer, inner, strict=True))

    carried = alike(eqn.outvars, body.outvars)
    return alike(eqn.invars, body.invars) - carried, carried


def follow(
    jaxpr: Any, arrive: Sequence[Value], nothing: Value, through: Callable[[Any, list[Value]], Sequence[Value]]
) -> list[Value]:
    """Carry a value for each variable through a jaxpr's equations, and return the results' values.

    `through` gives those of an equation's results, of the equation and its inputs' values; literals and constants have
    `nothing`.
    """
    known = dict(zip(jaxpr.invars, arrive, strict=True))

    def of(var: Any) -> Value:
        return nothing if hasattr(var, "val") else known.get(var, nothing)  # a literal is not hashable

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, through(eqn, [of(var) for var in eqn.invars]), strict=True))
    return [of(var) for var in jaxpr.outvars]


def users_line(eqn: Any) -> str:
    """Return the file and line of a user's program that an equation comes from; "" where it is a library's."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{Path(frame.file_name).name}:{frame.line_num}"
    return ""


_LIBRARIES = (str(Path(__file__).parents[1]), get_path("stdlib"), get_path("purelib"))
"""Beginnings of the names of files that a user did not write."""
