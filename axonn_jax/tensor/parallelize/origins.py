"""Origins of traced values: the input, and its dims, that each parameter of a layer is or is a part of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from axonn_jax.tensor.parallelize.convolution import bodies


@dataclass(frozen=True)
class Origin:
    """Input of a trace from which a value came, element by element."""

    index: int
    """Number of the input."""
    dims: tuple[int | None, ...]
    """For each dim of the value the input's dim; None for a dim of another size."""
    times: int = 1
    """Parts of the input that come by here, one after the other."""


Origins = list[Origin | None]


def find_origins(jaxpr: Any, arrive: Origins, at: Callable[[Any, Origins], None]) -> Origins:
    """Carry origins through a jaxpr's equations, show each equation with its inputs' ones to `at`, return the results'.

    Followed are transposes, a scan over a stack, indexing into one, and what keeps a value's dims (casts, scaling).
    """
    known: dict[Any, Origin | None] = dict(zip(jaxpr.invars, arrive, strict=True))

    def of(var: Any) -> Origin | None:
        return None if hasattr(var, "val") else known.get(var)  # a literal has a value and is not hashable

    for eqn in jaxpr.eqns:
        inputs = [of(var) for var in eqn.invars]
        at(eqn, inputs)
        known.update(zip(eqn.outvars, _results(eqn, inputs, at), strict=True))
    return [of(var) for var in jaxpr.outvars]


def _results(eqn: Any, inputs: Origins, at: Callable[[Any, Origins], None]) -> Origins:
    nothing: Origins = [None] * len(eqn.outvars)
    sizes = (len(eqn.invars), len(eqn.outvars))
    inner = next((body for body in bodies(eqn) if (len(body.invars), len(body.outvars)) == sizes), None)
    if eqn.primitive.name == "scan" and inner is not None:
        whole, length = eqn.params["num_consts"] + eqn.params["num_carry"], eqn.params["length"]
        find_origins(inner, inputs[:whole] + [_at_one_place(each, length) for each in inputs[whole:]], at)
        return nothing
    if eqn.primitive.name == "cond":
        for branch in bodies(eqn):
            find_origins(branch, inputs[1:], at)
        return nothing
    if inner is not None:
        return find_origins(inner, inputs, at)
    first = next(((each, var) for each, var in zip(inputs, eqn.invars, strict=True) if each is not None), None)
    if first is None:
        return nothing
    return [_through(eqn, *first, var.aval.shape) for var in eqn.outvars]


def _at_one_place(origin: Origin | None, length: int) -> Origin | None:
    """The origin of a slice along the first dim."""
    return None if origin is None else Origin(origin.index, origin.dims[1:], origin.times * length)


def _through(eqn: Any, origin: Origin, var: Any, shape: tuple[int, ...]) -> Origin | None:
    if eqn.primitive.name == "transpose":
        return replace(origin, dims=tuple(origin.dims[dim] for dim in eqn.params["permutation"]))
    if eqn.primitive.name == "squeeze":
        gone = eqn.params["dimensions"]
        return replace(origin, dims=tuple(dim for at, dim in enumerate(origin.dims) if at not in gone))
    if len(shape) != len(origin.dims):
        return None
    kept = zip(origin.dims, var.aval.shape, shape, strict=True)
    return replace(origin, dims=tuple(dim if before == after else None for dim, before, after in kept))
