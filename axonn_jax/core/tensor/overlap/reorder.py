"""Reordering of a traced program so that every collective overlaps with computation.

XLA's scheduler hides a collective behind a matmul only by chance, because its fusions first merge the elementwise work
of independent sub-batches into kernels that wait for all of them. Here the order is decided beforehand: a traced
function is simulated in virtual time on one compute unit and one network, with the longest chain first, and the
resulting order is written into the program as dependencies that carry no data.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.compat import ClosedJaxpr
from axonn_jax.core.grid import MESH_AXES
from axonn_jax.core.tensor.collectives import axis_size
from axonn_jax.core.tensor.overlap.list_scheduler import ListScheduler
from axonn_jax.core.tensor.overlap.op_cost import OpTimes, aval_of, is_collective

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_INLINED = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}


def in_order(f: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """Return `f` with its order of computation fixed.

    The result computes the same values with the same collectives. It is not differentiable: `f` takes gradients itself.

    Args:
        f: Function to be called inside a manual region.
    """

    def run(*args: *Ts) -> T:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        ordered = reorder(closed)
        flat = jaxpr_as_fun(ordered)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return run


def reorder(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a traced function with its equations reordered, and with dependencies that make XLA keep the order.

    A function without collectives is returned unchanged.
    """
    costs = OpTimes({axis: axis_size(axis) for axis in MESH_AXES})
    eqns, outvars = _flat(closed.jaxpr, costs)
    if not any(map(is_collective, eqns)):
        return closed
    return _with_ties(closed, outvars, ListScheduler(eqns, costs, _recomputes(closed.jaxpr)))


def _recomputes(jaxpr: Jaxpr, inside: bool = False) -> bool:
    """True if the backward pass recomputes matmuls."""
    if inside and any(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns):
        return True
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _INLINED:
            body = eqn.params[_INLINED[eqn.primitive.name]]
            recomputed = inside or bool(eqn.params.get("prevent_cse") and eqn.params.get("differentiated"))
            if _recomputes(body.jaxpr if isinstance(body, ClosedJaxpr) else body, recomputed):
                return True
    return False


def _flat(jaxpr: Jaxpr, costs: OpTimes) -> tuple[list[JaxprEqn], list[Var | Literal]]:
    """Return the equations with calls inlined, and the outputs; recomputation stays separate from the forward pass."""
    out: list[JaxprEqn] = []

    def add(jaxpr: Jaxpr, names: dict[Var, Var | Literal], outer: bool) -> None:
        def name(v: Var | Literal) -> Var | Literal:
            return v if isinstance(v, Literal) else names.get(v, v)

        for eqn in jaxpr.eqns:
            key = _INLINED.get(eqn.primitive.name)
            invars = [name(v) for v in eqn.invars]
            inner = eqn.params[key] if key is not None else None
            if inner is None or (isinstance(inner, ClosedJaxpr) and inner.consts):
                outvars = list(eqn.outvars) if outer else [_fresh_var(v) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                out.append(_with_ordered_body(eqn, costs).replace(invars=invars, outvars=outvars))
                continue
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                invars = _behind_barrier(invars, out)
            mapping = dict(zip(body.invars, invars, strict=True))
            add(body, mapping, False)
            results = [v if isinstance(v, Literal) else mapping.get(v, v) for v in body.outvars]
            names.update(zip(eqn.outvars, results, strict=True))

    top: dict[Var, Var | Literal] = {}
    add(jaxpr, top, True)
    return out, [v if isinstance(v, Literal) else top.get(v, v) for v in jaxpr.outvars]


def _with_ordered_body(eqn: JaxprEqn, costs: OpTimes) -> JaxprEqn:
    """Return a loop over layers with its body reordered; other equations, and loops without collectives, unchanged."""
    if eqn.primitive.name != "scan":
        return eqn
    body = eqn.params["jaxpr"]
    eqns, outvars = _flat(body.jaxpr, costs)
    if not any(map(is_collective, eqns)):
        return eqn
    scheduler = ListScheduler(eqns, costs, _recomputes(body.jaxpr))
    return eqn.replace(params={**eqn.params, "jaxpr": _with_ties(body, outvars, scheduler)})


def _fresh_var(v: Any) -> Var:
    return type(v)(v.aval)  # type: ignore[no-any-return]


def _behind_barrier(values: list[Var | Literal], out: list[JaxprEqn]) -> list[Var | Literal]:
    # As `jax.checkpoint` does: without a barrier XLA would eliminate the recomputation as a common subexpression.
    (eqn,) = jax.make_jaxpr(jax.lax.optimization_barrier)(jnp.zeros(())).jaxpr.eqns
    results = []
    for value in values:
        if isinstance(value, Var):
            # One barrier per value: the values vary over different mesh axes.
            out.append(eqn.replace(invars=[value], outvars=[_fresh_var(value)]))
            value = out[-1].outvars[0]
        results.append(value)
    return results


def _with_ties(closed: ClosedJaxpr, outvars: Sequence[Var | Literal], scheduler: ListScheduler) -> ClosedJaxpr:
    """Write the order into the program as dependencies.

    Each matmul depends on the previous one, and users of a collective's result depend on the last matmul that ran
    during the collective.
    """
    eqns, tie = scheduler.eqns, _ties()
    # Bit sets: a dependency that the program implies already needs no tie.
    ancestors: dict[int, int] = {}
    out: list[JaxprEqn] = []
    names: dict[Var, Var | Literal] = {}

    def tied(x: Var | Literal, earlier: Var) -> Var:
        out.append(tie(x, earlier))
        return out[-1].outvars[0]

    last: int | None = None
    delayed: dict[int, list[int]] = {}  # collectives whose users wait for an overlapping matmul, by that matmul
    awaited: dict[int, list[int]] = {}  # large collectives, by the first matmul after them, which waits for them
    for window in scheduler.windows:
        if window.overlapping is None:
            continue
        delayed.setdefault(window.overlapping, []).append(window.collective)
        if window.next is not None and not scheduler.small(window.collective):
            awaited.setdefault(window.next, []).append(window.collective)
    for i in scheduler.sequence:
        eqn = eqns[i]
        seen = 0
        first = scheduler.yields.get(i, ())
        for source in (*scheduler.producers[i], *first):
            seen |= ancestors[source] | (1 << source)
        invars = [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars]
        for small in first:
            invars[0] = tied(invars[0], eqns[small].outvars[0])
        if i in scheduler.matmul:
            side = _carrier(eqn)
            if last is not None and not seen >> last & 1:
                invars[side] = tied(invars[side], _result(eqns[last]))
                seen |= ancestors[last] | (1 << last)
            for collective in awaited.get(i, ()):
                invars[side] = tied(invars[side], eqns[collective].outvars[0])
            last = i
        ancestors[i] = seen
        out.append(eqn.replace(invars=invars))
        for collective in delayed.get(i, ()):
            result = eqns[collective].outvars[0]
            names[result] = tied(result, _result(eqn))
    results = [v if isinstance(v, Literal) else names.get(v, v) for v in outvars]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=out, outvars=results), closed.consts)


def _carrier(eqn: JaxprEqn) -> int:
    """Return the index of the operand, the smallest, through which a matmul or loop of matmuls takes a dependency."""
    variables = [i for i, v in enumerate(eqn.invars) if isinstance(v, Var) and _is_number(v)]
    return min(variables, key=lambda i: aval_of(eqn.invars[i]).size)


def _result(eqn: JaxprEqn) -> Var:
    """Return a result that shows that the equation has been computed, not a dropped one."""
    return next(v for v in eqn.outvars if type(v) is Var and _is_number(v))


def _is_number(v: Var) -> bool:
    """True for floating-point variables, as opposed to indices and random keys."""
    return bool(jnp.issubdtype(aval_of(v).dtype, jnp.floating))


def _ties() -> Callable[[Var | Literal, Var], JaxprEqn]:
    # Traced here and not once per process, since an equation belongs to the mesh it was traced on.
    (eqn,) = jax.make_jaxpr(depend_on)(jnp.zeros(()), jnp.zeros(())).jaxpr.eqns
    return lambda x, earlier: eqn.replace(invars=[x, earlier], outvars=[_fresh_var(x)])
