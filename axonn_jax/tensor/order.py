"""An order of computation that leaves every collective something to run beside.

XLA's scheduler hides a collective behind a matmul only if it happens to put one there, and before that its fusions
join the elementwise work of independent streams into kernels that wait for all of them. Here the order is decided
first: a traced function is run in virtual time on one compute unit and one network, the longest chain first, and the
order found is written into the program as dependencies that carry no data.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
from jax.interpreters import mlir

_INLINED = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
_COLLECTIVES = frozenset({"psum", "psum2", "psum_invariant", "all_gather", "reduce_scatter", "pmax", "ppermute"})
_ON_THE_WAY = frozenset({"reshape", "transpose", "convert_element_type", "squeeze", "add_any", "pvary", "pcast"})
_FLOPS_PER_S = 4e14
_BYTES_PER_S = 2e12
_NETWORK_BYTES_PER_S = 2e11
_LATENCY_S = 1e-5
_PATIENCE = 6  # matmuls: a weight gradient waits no longer, or its operands would fill the memory
"""An accelerator's round figures: only the order is taken from them, never a time."""


# `x` as it is, computed after `other`. A primitive of its own because the result varies over the mesh axes that `x`
# varies over, whatever `other` does.
_tie = Primitive("tie")
_tie.def_abstract_eval(lambda x, other: x)


def _lowered(x: jax.Array, other: jax.Array) -> jax.Array:
    """A zero computed from `other` is added: XLA removes an `optimization_barrier` before it schedules."""
    return x + jnp.minimum(jnp.abs(other.ravel()[0]), 0).astype(x.dtype)


mlir.register_lowering(_tie, mlir.lower_fun(_lowered, multiple_results=False))


def in_order(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its order of computation fixed; for use inside a manual region, and not differentiable.

    Gradients are taken inside `f`. Values and collectives are those of `f`.
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        ordered = order(closed)
        flat = jaxpr_as_fun(ordered)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return run


def order(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A traced function with its equations in the order found, and the dependencies that keep XLA to it."""
    eqns, outvars = _flat(closed.jaxpr)
    return _with_ties(closed, eqns, outvars, _Plan(eqns).run())


def _flat(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations with calls inlined; what a call recomputes on purpose is kept apart from what it recomputes."""
    out: list[JaxprEqn] = []

    def add(jaxpr: Jaxpr, names: dict[Var, Any], outer: bool) -> None:
        def name(v: Any) -> Any:
            return v if isinstance(v, Literal) else names.get(v, v)

        for eqn in jaxpr.eqns:
            key = _INLINED.get(eqn.primitive.name)
            invars = [name(v) for v in eqn.invars]
            inner = eqn.params[key] if key is not None else None
            if inner is None or (isinstance(inner, ClosedJaxpr) and inner.consts):
                outvars = list(eqn.outvars) if outer else [_like(v) for v in eqn.outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
                out.append(eqn.replace(invars=invars, outvars=outvars))
                continue
            body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                invars = _apart(invars, out)
            mapping = dict(zip(body.invars, invars, strict=True))
            add(body, mapping, False)
            results = [v if isinstance(v, Literal) else mapping.get(v, v) for v in body.outvars]
            names.update(zip(eqn.outvars, results, strict=True))

    top: dict[Var, Any] = {}
    add(jaxpr, top, True)
    return out, [v if isinstance(v, Literal) else top.get(v, v) for v in jaxpr.outvars]


def _like(v: Any) -> Var:
    return type(v)(v.aval)  # type: ignore[no-any-return]


def _apart(values: list[Any], out: list[JaxprEqn]) -> list[Any]:
    """Puts values behind a barrier, as `jax.checkpoint` does: XLA would find the first computation's results."""
    (eqn,) = jax.make_jaxpr(jax.lax.optimization_barrier)(jnp.zeros(())).jaxpr.eqns
    apart = []
    for value in values:
        if isinstance(value, Var):
            out.append(eqn.replace(invars=[value], outvars=[_like(value)]))  # one each: they vary over different axes
            value = out[-1].outvars[0]
        apart.append(value)
    return apart


@dataclass
class _Window:
    """A collective and the matmuls that ran while it was under way."""

    collective: int
    matmuls: list[int] = field(default_factory=list)
    next: int | None = None
    """The first matmul after it."""


class _Plan:
    """Virtual time: one compute unit, and a network that serves one collective an axis at a time."""

    def __init__(self, eqns: Sequence[JaxprEqn]):
        self.eqns = eqns
        producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.before = [
            sorted({producer[v] for v in eqn.invars if isinstance(v, Var) and v in producer}) for eqn in eqns
        ]
        self.after: list[list[int]] = [[] for _ in eqns]
        for i, sources in enumerate(self.before):
            for source in sources:
                self.after[source].append(i)
        self.seconds = [_seconds(eqn) for eqn in eqns]
        self.rank = [0.0] * len(eqns)  # length of the longest chain that starts here
        for i in reversed(range(len(eqns))):
            self.rank[i] = self.seconds[i] + max((self.rank[j] for j in self.after[i]), default=0.0)
        self.matmul = _matmuls(eqns)
        self.hurry = [False] * len(eqns)  # stands between a matmul and its collective: the network waits for it
        for i in reversed(range(len(eqns))):
            if eqns[i].primitive.name in _ON_THE_WAY:
                self.hurry[i] = any(_is_collective(eqns[j]) or self.hurry[j] for j in self.after[i])
        self.collective = [_is_collective(eqn) for eqn in eqns]

    def run(self) -> "_Order":
        missing = [len(sources) for sources in self.before]
        now = 0.0
        matmuls_run = 0
        lanes: dict[str, float] = {}  # when the network of an axis is free
        ready: list[tuple[bool, float, int]] = []
        waiting: deque[tuple[int, int]] = deque()  # matmuls that are ready, with how many had run by then
        started: set[int] = set()
        under_way: list[tuple[float, _Window]] = []
        windows: list[_Window] = []
        sequence: list[int] = []

        def arrive(i: int) -> None:
            if not self.collective[i]:
                heapq.heappush(ready, (not self.hurry[i], -self.rank[i], i))
                if i in self.matmul:
                    waiting.append((matmuls_run, i))
                return
            lane = _axes(self.eqns[i])
            begin = now if self.small(i) else max(lanes.get(lane, 0.0), now)  # small ones pass the others
            lanes[lane] = max(lanes.get(lane, 0.0), begin + self.seconds[i])
            sequence.append(i)
            windows.append(_Window(i))
            under_way.append((begin + self.seconds[i], windows[-1]))

        def release(i: int) -> None:
            for j in self.after[i]:
                missing[j] -= 1
                if missing[j] == 0:
                    arrive(j)

        def finish(window: _Window) -> None:
            under_way[:] = [(end, other) for end, other in under_way if other is not window]
            release(window.collective)

        for i in [i for i, count in enumerate(missing) if count == 0]:
            arrive(i)
        while ready or under_way:
            ended = [window for end, window in under_way if end <= now]
            over = [window for window in ended if window.matmuls or self.small(window.collective)]
            for window in over:
                finish(window)
            while waiting and waiting[0][1] in started:
                waiting.popleft()
            while ready and ready[0][2] in started:
                heapq.heappop(ready)
            if not ready:
                later = [end for end, _ in under_way if end > now]
                if not over and later:
                    now = min(later)
                elif not over:  # nothing else can run beside it
                    finish(ended[0])
                continue
            patient = not waiting or matmuls_run - waiting[0][0] < _PATIENCE
            i = heapq.heappop(ready)[2] if patient or ready[0][0] is False else waiting.popleft()[1]
            started.add(i)
            if i in self.matmul:
                matmuls_run += 1
                for window in windows:
                    if window.next is None and all(window is not other for _, other in under_way):
                        window.next = i
                for _, window in under_way:
                    window.matmuls.append(i)
            now += self.seconds[i]
            sequence.append(i)
            release(i)
        return _Order(sequence, windows, self)

    def small(self, i: int) -> bool:
        """Whether a collective is a matter of latency, as a norm's sums are."""
        return self.seconds[i] < 2 * _LATENCY_S


@dataclass
class _Order:
    sequence: list[int]
    windows: list[_Window]
    plan: _Plan


def _with_ties(closed: ClosedJaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any], found: _Order) -> ClosedJaxpr:
    """Writes the order into the program.

    A matmul comes after the one before it, and what uses a collective's result comes after the last matmul that ran
    beside the collective.
    """
    plan = found.plan
    ancestors: dict[int, int] = {}  # bit sets
    behind = {window.collective: window.matmuls[-1] for window in found.windows if window.matmuls}
    out: list[JaxprEqn] = []
    names: dict[Var, Any] = {}
    last: int | None = None
    delayed: dict[int, list[int]] = {}
    position = {i: n for n, i in enumerate(found.sequence)}
    awaited: dict[int, list[int]] = {}  # what nothing else would wait for before the end, by the matmul that does
    for window in found.windows:
        if window.next is not None and window.matmuls and not plan.small(window.collective):
            awaited.setdefault(window.next, []).append(window.collective)
    for i in found.sequence:
        if _is_collective(eqns[i]) and i in behind and position[behind[i]] > position[i]:
            delayed.setdefault(behind[i], []).append(i)
    for i in found.sequence:
        eqn = eqns[i]
        seen = 0
        for source in plan.before[i]:
            seen |= ancestors[source] | (1 << source)
        invars = [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars]
        if i in plan.matmul:
            if last is not None and not seen >> last & 1:
                side = _carrier(eqn, plan, found)
                tied = _tie_eqn(invars[side], eqns[last].outvars[0])
                out.append(tied)
                invars[side] = tied.outvars[0]
                seen |= ancestors[last] | (1 << last)
            for collective in awaited.get(i, ()):
                side = _carrier(eqn, plan, found)
                tied = _tie_eqn(invars[side], eqns[collective].outvars[0])
                out.append(tied)
                invars[side] = tied.outvars[0]
            last = i
        ancestors[i] = seen
        out.append(eqn.replace(invars=invars))
        for collective in delayed.get(i, ()):
            result = eqns[collective].outvars[0]
            tied = _tie_eqn(result, eqn.outvars[0])
            out.append(tied)
            names[result] = tied.outvars[0]
    results = [v if isinstance(v, Literal) else names.get(v, v) for v in outvars]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=out, outvars=results), closed.consts)


def _carrier(eqn: JaxprEqn, plan: _Plan, found: _Order) -> int:
    """Which operand of a matmul takes the dependency: the smaller, which costs less should it become a copy."""
    sizes = [_aval(v).size for v in eqn.invars]
    return int(sizes[1] < sizes[0])


def _tie_eqn(x: Any, other: Any) -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(_tie.bind)(jnp.zeros(()), jnp.zeros(())).jaxpr.eqns
    return eqn.replace(invars=[x, other], outvars=[_like(x)])


def _matmuls(eqns: Iterable[JaxprEqn]) -> Mapping[int, float]:
    """Matmuls worth hiding a collective behind, by position."""
    found = {i: _flops(eqn) for i, eqn in enumerate(eqns) if eqn.primitive.name == "dot_general"}
    least = max(found.values(), default=0.0) / 100
    return {i: flops for i, flops in found.items() if flops >= least}


def _is_collective(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _COLLECTIVES


def _axes(eqn: JaxprEqn) -> str:
    return str(eqn.params.get("axes", eqn.params.get("axis_name")))


def _flops(eqn: JaxprEqn) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = _aval(eqn.invars[0]).shape
    return 2.0 * _aval(eqn.outvars[0]).size * float(np.prod([shape[d] for d in contract]))


def _aval(atom: Any) -> Any:
    return atom.aval


def _bytes(atoms: Iterable[Any]) -> float:
    return sum(a.aval.size * getattr(a.aval.dtype, "itemsize", 4) for a in atoms if hasattr(a.aval, "size"))


def _seconds(eqn: JaxprEqn) -> float:
    if eqn.primitive.name == "all_gather":
        return 0.0  # of weights, which are there from the start
    if _is_collective(eqn):
        return _LATENCY_S + max(_bytes(eqn.invars), _bytes(eqn.outvars)) / _NETWORK_BYTES_PER_S
    if eqn.primitive.name == "dot_general":
        return _flops(eqn) / _FLOPS_PER_S
    return _bytes(eqn.outvars) / _BYTES_PER_S / 4  # most is fused with its neighbours
