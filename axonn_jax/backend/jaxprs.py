"""Equations of traced programs, those of inner programs included."""

from collections.abc import Iterator
from typing import Any


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
