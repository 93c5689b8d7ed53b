"""Evaluation of a traced function with some of its operations in forms that XLA's CPU backend runs faster."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from axonn_jax.any_flax.pooling import largest_of, pools_disjoint_windows
from axonn_jax.any_flax.products import flat_product, multiplies_rows
from axonn_jax.core.backend.traits import prefers_flat_forms
from axonn_jax.core.compat import ClosedJaxpr

Form = Callable[..., jax.Array]
"""Function of an equation and its operands that returns its result."""


def in_fast_forms(f: Callable[..., Any]) -> Callable[..., Any]:
    """Replace max pooling and the products of layers by faster forms, on CPUs.

    Values and gradients are the same but for the order of sums. What runs inside an inner program (`jax.jit`,
    `jax.checkpoint`, `lax.scan`) is not replaced.

    Args:
        f: Function of arrays.

    Returns:
        The function with its operations replaced, or `f` itself on other backends.
    """
    if not prefers_flat_forms(jax.default_backend()):
        return f

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shape), _results(closed, jax.tree.leaves(args)))

    return run


def _form_of(eqn: JaxprEqn) -> Form | None:
    if pools_disjoint_windows(eqn):
        return largest_of
    return flat_product if multiplies_rows(eqn) else None


def _results(closed: ClosedJaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
    jaxpr = closed.jaxpr
    values: dict[Var, jax.Array] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Var | Literal) -> jax.Array:
        return atom.val if isinstance(atom, Literal) else values[atom]

    last_read = {atom: at for at, eqn in enumerate(jaxpr.eqns) for atom in eqn.invars if isinstance(atom, Var)}
    last_read |= {atom: len(jaxpr.eqns) for atom in jaxpr.outvars if isinstance(atom, Var)}
    for form, numbered in groupby(enumerate(jaxpr.eqns), lambda pair: _form_of(pair[1])):
        pairs = list(numbered)
        if form is None:
            values |= _evaluated(jaxpr, [eqn for _, eqn in pairs], values, last_read, pairs[-1][0])
            continue
        for _, eqn in pairs:
            values[eqn.outvars[0]] = form(eqn, *map(value_of, eqn.invars))
    return [value_of(atom) for atom in jaxpr.outvars]


def _evaluated(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], values: Mapping[Var, jax.Array], last_read: Mapping[Var, int], end: int
) -> dict[Var, jax.Array]:
    """Return the values of consecutive equations that are read behind them."""
    computed = [var for eqn in eqns for var in eqn.outvars]
    inside = set(computed)
    inputs = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var) and atom not in inside)
    outputs = [var for var in computed if last_read.get(var, -1) > end]
    part = jaxpr.replace(constvars=[], invars=list(inputs), outvars=outputs, eqns=list(eqns))
    results = jaxpr_as_fun(ClosedJaxpr(part, []))(*(values[var] for var in inputs))
    return dict(zip(outputs, results, strict=True))
