"""Partition of a traced function into programs that run one after the other: forward, input gradient, weight gradient.

A stage's forward and backward passes are traced as one function. The outputs that a program owes decide its equations:
the equations that a later program needs and an earlier one has run hand their values over (residuals), or run again, as
the activation policy says. Nothing is differentiated here, and no program computes a value that another has handed
over.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from axonn_jax.compat import ClosedJaxpr
from axonn_jax.options import Activations

Keep = Callable[[JaxprEqn], bool]
"""True if the results of an equation may be handed over, rather than computed again."""

_LAYOUT = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "pvary", "copy", "name"})
"""Equations that only show their operand in another form: a residual is the operand, once, and not the forms."""

_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "max", "min", "tanh", "exp", "logistic", "rsqrt", "square", "integer_pow"}
    | {"select_n", "convert_element_type", "stop_gradient"}
)
"""Equations that cost less to run again than their result costs to write, keep and read."""

_LONGEST = 16  # elementwise equations run again for one value
_SMALL = 8  # a sum has so many times fewer elements than its operand


@dataclass(frozen=True)
class Part:
    """Program of a cut function."""

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    """Positions of the part's inputs among those of the whole function."""
    taken: tuple[tuple[int, int], ...]
    """Values from earlier parts, as (part, position among that part's handed values)."""
    handed: tuple[Var, ...]
    """Values for later parts, which follow the part's outputs."""
    outputs: tuple[int, ...]
    """Positions of the part's outputs among those of the whole function."""

    def __call__(self, inputs: Sequence[Any], taken: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the part on its inputs and the values of earlier parts, in the fields' order: (outputs, handed)."""
        results = jaxpr_as_fun(self.closed)(*inputs, *taken)
        return list(results[: len(self.outputs)]), list(results[len(self.outputs) :])


def cut(
    closed: ClosedJaxpr, goals: Sequence[Iterable[int]], free: Iterable[int], keep: Keep = lambda eqn: True
) -> list[Part]:
    """Cut a function into one part for each set of output positions in `goals`, in that order.

    Inputs are given to every part that needs them. Values that depend on `free` inputs alone (parameters: casts,
    gathered weights) are computed again wherever they are needed, so that they never wait in memory between two parts.
    Of the rest, parts hand over values that a later part needs, the first one only those that `keep` allows.
    """
    jaxpr = closed.jaxpr
    position = {var: i for i, var in enumerate(jaxpr.invars)}
    producer: dict[Var, JaxprEqn] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    cheap = _depend_only_on(closed, {jaxpr.invars[i] for i in free})
    home: dict[Var, int] = {}  # the latest part that has a value
    runs: list[list[JaxprEqn]] = []
    wanted: list[dict[Var, int]] = []  # values that each part takes over, with the earlier part of each
    for number, outputs in enumerate(goals):
        chosen: dict[int, JaxprEqn] = {}
        takes: dict[Var, int] = {}
        seen: set[Var] = set()
        todo = [v for i in outputs if isinstance(v := jaxpr.outvars[i], Var)]
        while todo:
            var = todo.pop()
            if var in seen or var in position or var in jaxpr.constvars:
                continue
            seen.add(var)
            eqn = producer[var]
            again = var in cheap or _only_shows(eqn)
            before = home.get(var)
            if not again and before is not None and (before or keep(eqn)):
                takes[var] = before
                continue
            chosen[id(eqn)] = eqn
            todo += [v for v in eqn.invars if isinstance(v, Var)]
        # A value that elementwise equations give from values handed over anyway need not be handed over.
        available = {var: source for earlier in wanted for var, source in earlier.items()} | takes
        for var in sorted(takes, key=lambda var: -_size(var)):
            known = (set(available) | set(position) | cheap) - {var}
            chain = _elementwise_from(var, known, producer)
            sources = {v for v in _reads(chain) if v in available and v != var} if chain else set()
            if sources and chain:
                alone = sum(_size(v) * _width(v) for v in sources if v not in takes)
                if number > 1 and 2 * alone > 3 * _size(var) * _width(var) and sources <= set(wanted[number - 1]):
                    # Its sources would wait for it alone, and are more: the part before computes it and hands it over.
                    runs[number - 1] += [*chain, *_cheap_ones(chain, cheap, producer)]
                    home[var] = takes[var] = available[var] = number - 1
                    continue
                del takes[var]
                available = {v: source for v, source in available.items() if v != var}
                takes.update((v, available[v]) for v in sources)
                chosen.update((id(eqn), eqn) for eqn in [*chain, *_cheap_ones(chain, cheap, producer)])
        eqns = sorted(chosen.values(), key=lambda eqn: order[id(eqn)])
        if number:
            given = set(_reads(runs[number - 1])) & set(position)  # a forward is not given the gradient that arrives
            here = {v for v, part in home.items() if part == number - 1} | set(wanted[-1]) | given | cheap
            for group, left in _sums_ahead(eqns, {jaxpr.outvars[i] for i in outputs}, takes, here, producer):
                runs[number - 1] += [*group, *_cheap_ones(group, cheap, producer)]
                takes[group[-1].outvars[0]], eqns = number - 1, left
        for eqn in eqns:
            home.update((var, number) for var in eqn.outvars)
        runs.append(eqns)
        wanted.append(takes)
    handed = [
        tuple(dict.fromkeys(var for takes in wanted for var, source in takes.items() if source == part))
        for part in range(len(runs))
    ]
    ordered = [sorted({id(eqn): eqn for eqn in eqns}.values(), key=lambda eqn: order[id(eqn)]) for eqns in runs]
    return [
        _part(closed, tuple(outputs), eqns, wanted[i], handed, i, position)
        for i, (outputs, eqns) in enumerate(zip(goals, ordered, strict=True))
    ]


def _only_shows(eqn: JaxprEqn) -> bool:
    """Return True if an equation gives its operand, or a large part of it, in another form or a wider type."""
    if eqn.primitive.name in _LAYOUT:
        return True
    if eqn.primitive.name == "convert_element_type":
        return _width(eqn.invars[0]) < _width(eqn.outvars[0])
    parts = eqn.primitive.name in ("slice", "split", "squeeze")
    return parts and 4 * _size(eqn.outvars[0]) >= _size(eqn.invars[0])


def _elementwise(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "jit":  # as jax.nn.silu is
        return all(map(_elementwise, eqn.params["jaxpr"].eqns))
    return eqn.primitive.name in _ELEMENTWISE or _only_shows(eqn)


def _sums_ahead(
    eqns: list[JaxprEqn], ends: set[Any], takes: dict[Var, int], here: set[Var], producer: Mapping[Var, JaxprEqn]
) -> Iterator[tuple[list[JaxprEqn], list[JaxprEqn]]]:
    """Yield sums that the earlier part, which has the values `here`, can compute at no further cost.

    Yields the equations of each, the sum last, and the part's own without them, and corrects `takes`. The gradient of a
    norm's scale, for example, is a vector, much smaller than its terms.
    """
    for eqn in [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]:
        operand: Any = eqn.invars[0]
        chain = [] if operand in here else _elementwise_from(operand, here, producer)
        if chain is None or _SMALL * _size(eqn.outvars[0]) > _size(operand):
            continue
        read, left = set(ends), []
        for other_eqn in reversed(eqns):
            if other_eqn is not eqn and any(v in read for v in other_eqn.outvars):
                left.append(other_eqn)
                read |= {v for v in other_eqn.invars if isinstance(v, Var)}
        freed = [v for v in takes if v not in read]
        if freed:
            eqns = left[::-1]
            for var in freed:
                del takes[var]
            yield [*chain, eqn], eqns


def _elementwise_from(var: Var, known: set[Var], producer: Mapping[Var, JaxprEqn]) -> list[JaxprEqn] | None:
    """Return the few elementwise equations that give `var` from `known` values, or None if there are none such."""
    chain: dict[int, JaxprEqn] = {}
    todo = [var]
    while todo:
        if (eqn := producer.get(todo.pop())) is None:
            return None
        if id(eqn) in chain:
            continue
        if len(chain) == _LONGEST or not _elementwise(eqn):
            return None
        chain[id(eqn)] = eqn
        for v in eqn.invars:
            if isinstance(v, Var) and v not in known:
                todo.append(v)
    return list(chain.values())


def _reads(eqns: Iterable[JaxprEqn]) -> Iterator[Var]:
    return (v for eqn in eqns for v in eqn.invars if isinstance(v, Var))


def _cheap_ones(eqns: Iterable[JaxprEqn], cheap: set[Var], producer: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """Return the equations behind the cheap values that `eqns` read."""
    cheap_eqns: dict[int, JaxprEqn] = {}
    todo = [v for v in _reads(eqns) if v in cheap]
    while todo:
        eqn = producer[todo.pop()]
        if id(eqn) not in cheap_eqns:
            cheap_eqns[id(eqn)] = eqn
            todo += [v for v in _reads([eqn]) if v in producer]
    return list(cheap_eqns.values())


def _part(
    closed: ClosedJaxpr,
    outputs: tuple[int, ...],
    eqns: list[JaxprEqn],
    takes: Mapping[Var, int],
    handed: Sequence[tuple[Var, ...]],
    number: int,
    position: Mapping[Var, int],
) -> Part:
    whole = closed.jaxpr
    results = [*(whole.outvars[i] for i in outputs), *handed[number]]
    read = [*(v for eqn in eqns for v in eqn.invars), *results]
    inputs = list(dict.fromkeys(v for v in read if isinstance(v, Var) and v in position))
    jaxpr = whole.replace(invars=[*inputs, *takes], outvars=results, eqns=eqns)
    return Part(
        ClosedJaxpr(jaxpr, closed.consts),
        tuple(position[var] for var in inputs),
        tuple((source, handed[source].index(var)) for var, source in takes.items()),
        handed[number],
        outputs,
    )


def _depend_only_on(closed: ClosedJaxpr, free: set[Var]) -> set[Var]:
    """Values that depend on nothing but `free` inputs and constants, or are random keys (which cost nothing)."""
    known = free | set(closed.jaxpr.constvars)
    for eqn in closed.jaxpr.eqns:
        if all(isinstance(v, Literal) or v in known for v in eqn.invars):
            known.update(eqn.outvars)
        else:
            known.update(v for v in eqn.outvars if _is_key(v))
    return known - free


def keeps(activations: Activations) -> Keep:
    """Return the rule by which a forward hands values over under an activation policy.

    `none`: all but gathered values, of which it hands over the part; `dots`: results of matmuls with weights (no batch
    dims); `save_collectives`: values reduced over devices; others: none. Choices, as routers make, are always handed
    over: computed again, they could come out differently.
    """

    def keep(eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if activations == "none":
            return name != "all_gather"
        if activations == "dots" and name == "dot_general":
            return not eqn.params["dimension_numbers"][1][0]
        reduced = activations == "save_collectives" and name.startswith(("psum", "pmax", "reduce_scatter"))
        return reduced or name == "top_k"

    return keep


def _size(atom: Any) -> int:
    return int(atom.aval.size)


def _width(atom: Any) -> int:
    return int(atom.aval.dtype.itemsize)


def _is_key(atom: Any) -> bool:
    return bool(jax.numpy.issubdtype(atom.aval.dtype, jax.dtypes.prng_key))
