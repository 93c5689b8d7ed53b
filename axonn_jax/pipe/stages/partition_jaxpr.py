"""Partition of a traced function into programs that run in sequence: forward, input gradient, weight gradient.

A stage's forward and backward passes are traced as one function. Each program runs the equations that its outputs
depend on. Where an earlier program has run one of them already, it either hands the value over (a residual) or the
equation runs again, by the activation policy. Nothing is differentiated here, and no program recomputes a residual.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from axonn_jax.core.compat import ClosedJaxpr
from axonn_jax.core.options import Activations

Keep = Callable[[JaxprEqn], bool]
"""True if the results of an equation may be handed over rather than recomputed."""

_LAYOUT = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "pvary", "copy", "name"})
"""Equations that only present their operand in another form: the operand is the residual, once, and not the forms."""

_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "max", "min", "tanh", "exp", "logistic", "rsqrt", "square", "integer_pow"}
    | {"select_n", "convert_element_type", "stop_gradient"}
)
"""Equations that cost less to run again than their result costs to write, store and read."""

_LONGEST = 16  # elementwise equations that are run again for one value, at most
_SMALL = 8  # a sum that moves ahead has at least this many times fewer elements than its operand


@dataclass(frozen=True)
class Part:
    """One program of a partitioned function."""

    closed: ClosedJaxpr
    inputs: tuple[int, ...]
    """Positions of the part's inputs among those of the full function."""
    residual_inputs: tuple[tuple[int, int], ...]
    """Values from earlier parts, as (part, position among that part's residuals)."""
    residuals: tuple[Var, ...]
    """Values for later parts, returned after the part's outputs."""
    outputs: tuple[int, ...]
    """Positions of the part's outputs among those of the full function."""

    def __call__(self, inputs: Sequence[Any], residual_inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the part.

        Args:
            inputs: Values of `self.inputs`, in order.
            residual_inputs: Values of `self.residual_inputs`, in order.

        Returns:
            Values of `self.outputs` and of `self.residuals`.
        """
        results = jaxpr_as_fun(self.closed)(*inputs, *residual_inputs)
        return list(results[: len(self.outputs)]), list(results[len(self.outputs) :])


def cut(
    closed: ClosedJaxpr, goals: Sequence[Iterable[int]], free: Iterable[int], keep: Keep = lambda eqn: True
) -> list[Part]:
    """Partition a function into one part per entry of `goals`, which run in that order.

    Args:
        closed: The function.
        goals: Output positions of each part.
        free: Input positions, those of parameters. Values that depend on nothing else (casts, gathered weights) are
            recomputed by every part that reads them, so that they never occupy memory between two parts.
        keep: Values that the first part may hand over; later parts hand over whatever is read after them.
    """
    jaxpr = closed.jaxpr
    position = {var: i for i, var in enumerate(jaxpr.invars)}
    producer: dict[Var, JaxprEqn] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    cheap = _depend_only_on(closed, {jaxpr.invars[i] for i in free})
    home: dict[Var, int] = {}  # the latest part that has a value
    runs: list[list[JaxprEqn]] = []
    takes_of: list[dict[Var, int]] = []  # values that each part takes over, with the earlier part of each
    for number, outputs in enumerate(goals):
        selected: dict[int, JaxprEqn] = {}
        takes: dict[Var, int] = {}
        seen: set[Var] = set()
        todo = [v for i in outputs if isinstance(v := jaxpr.outvars[i], Var)]
        # Walk back from the outputs, and stop wherever an earlier part can hand the value over.
        while todo:
            var = todo.pop()
            if var in seen or var in position or var in jaxpr.constvars:
                continue
            seen.add(var)
            eqn = producer[var]
            recompute = var in cheap or _only_shows(eqn)
            source = home.get(var)
            # `keep` limits only part 0, the forward: the activation policy is about its memory.
            if not recompute and source is not None and (source or keep(eqn)):
                takes[var] = source
                continue
            selected[id(eqn)] = eqn
            todo += [v for v in eqn.invars if isinstance(v, Var)]
        # A value need not be handed over if elementwise equations give it from values that are handed over anyway.
        available = {var: source for earlier in takes_of for var, source in earlier.items()} | takes
        # Largest first: the value that is dropped first saves the most, and may leave smaller ones without a source.
        for var in sorted(takes, key=lambda var: -_size(var)):
            defined = (set(available) | set(position) | cheap) - {var}
            chain = _elementwise_from(var, defined, producer)
            sources = {v for v in _reads(chain) if v in available and v != var} if chain else set()
            if sources and chain:
                extra_bytes = sum(_size(v) * _width(v) for v in sources if v not in takes)
                outweighed = 2 * extra_bytes > 3 * _size(var) * _width(var)
                if number > 1 and outweighed and sources <= set(takes_of[number - 1]):
                    # The sources would wait for this value only, and are larger: the previous part, which has them,
                    # computes it and hands it over.
                    runs[number - 1] += [*chain, *_cheap_eqns(chain, cheap, producer)]
                    home[var] = takes[var] = available[var] = number - 1
                    continue
                del takes[var]
                available = {v: source for v, source in available.items() if v != var}
                takes.update((v, available[v]) for v in sources)
                selected.update((id(eqn), eqn) for eqn in [*chain, *_cheap_eqns(chain, cheap, producer)])
        eqns = sorted(selected.values(), key=lambda eqn: order[id(eqn)])
        if number:
            # Only inputs that the previous part reads already: a forward does not get the gradient that arrives later.
            read = set(_reads(runs[number - 1])) & set(position)
            resident = {v for v, part in home.items() if part == number - 1} | set(takes_of[-1]) | read | cheap
            for group, remaining in _sums_ahead(eqns, {jaxpr.outvars[i] for i in outputs}, takes, resident, producer):
                runs[number - 1] += [*group, *_cheap_eqns(group, cheap, producer)]
                takes[group[-1].outvars[0]], eqns = number - 1, remaining
        for eqn in eqns:
            home.update((var, number) for var in eqn.outvars)
        runs.append(eqns)
        takes_of.append(takes)
    residuals = [
        tuple(dict.fromkeys(var for takes in takes_of for var, source in takes.items() if source == part))
        for part in range(len(runs))
    ]
    # Later parts have added equations to earlier ones, some of them twice: restore the traced order, once each.
    ordered = [sorted({id(eqn): eqn for eqn in eqns}.values(), key=lambda eqn: order[id(eqn)]) for eqns in runs]
    return [
        _part(closed, tuple(outputs), eqns, takes_of[i], residuals, i, position)
        for i, (outputs, eqns) in enumerate(zip(goals, ordered, strict=True))
    ]


def _only_shows(eqn: JaxprEqn) -> bool:
    """Return True if an equation gives its operand, or a large part of it, in another layout or a wider dtype."""
    if eqn.primitive.name in _LAYOUT:
        return True
    # A widening cast: the narrow operand is the smaller residual, and casting it again loses nothing.
    if eqn.primitive.name == "convert_element_type":
        return _width(eqn.invars[0]) < _width(eqn.outvars[0])
    parts = eqn.primitive.name in ("slice", "split", "squeeze")
    return parts and 4 * _size(eqn.outvars[0]) >= _size(eqn.invars[0])


def _elementwise(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "jit":  # jax.nn.silu, for example
        return all(map(_elementwise, eqn.params["jaxpr"].eqns))
    return eqn.primitive.name in _ELEMENTWISE or _only_shows(eqn)


def _sums_ahead(
    eqns: list[JaxprEqn], ends: set[Any], takes: dict[Var, int], resident: set[Var], producer: Mapping[Var, JaxprEqn]
) -> Iterator[tuple[list[JaxprEqn], list[JaxprEqn]]]:
    """Find sums that the previous part can compute from its `resident` values, and remove them from `takes`.

    The gradient of a norm's scale, for example, is a vector, much smaller than the terms it sums.

    Yields:
        The equations of a sum, the reduction last, and the part's remaining equations.
    """
    for eqn in [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]:
        operand: Any = eqn.invars[0]
        chain = [] if operand in resident else _elementwise_from(operand, resident, producer)
        if chain is None or _SMALL * _size(eqn.outvars[0]) > _size(operand):
            continue
        # Eliminate equations that are dead without the sum. Moving it only pays if that frees a residual.
        read, remaining = set(ends), []
        for other_eqn in reversed(eqns):
            if other_eqn is not eqn and any(v in read for v in other_eqn.outvars):
                remaining.append(other_eqn)
                read |= {v for v in other_eqn.invars if isinstance(v, Var)}
        freed = [v for v in takes if v not in read]
        if freed:
            eqns = remaining[::-1]
            for var in freed:
                del takes[var]
            yield [*chain, eqn], eqns


def _elementwise_from(var: Var, defined: set[Var], producer: Mapping[Var, JaxprEqn]) -> list[JaxprEqn] | None:
    """Return at most `_LONGEST` elementwise equations that compute `var` from `defined` ones, or None."""
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
            if isinstance(v, Var) and v not in defined:
                todo.append(v)
    return list(chain.values())


def _reads(eqns: Iterable[JaxprEqn]) -> Iterator[Var]:
    return (v for eqn in eqns for v in eqn.invars if isinstance(v, Var))


def _cheap_eqns(eqns: Iterable[JaxprEqn], cheap: set[Var], producer: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """Return the equations that compute the cheap values that `eqns` read."""
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
    residuals: Sequence[tuple[Var, ...]],
    number: int,
    position: Mapping[Var, int],
) -> Part:
    full = closed.jaxpr
    results = [*(full.outvars[i] for i in outputs), *residuals[number]]
    read = [*(v for eqn in eqns for v in eqn.invars), *results]
    inputs = list(dict.fromkeys(v for v in read if isinstance(v, Var) and v in position))
    jaxpr = full.replace(invars=[*inputs, *takes], outvars=results, eqns=eqns)
    return Part(
        ClosedJaxpr(jaxpr, closed.consts),
        tuple(position[var] for var in inputs),
        tuple((source, residuals[source].index(var)) for var, source in takes.items()),
        residuals[number],
        outputs,
    )


def _depend_only_on(closed: ClosedJaxpr, free: set[Var]) -> set[Var]:
    """Return the values that depend on nothing but `free` inputs and constants, and random keys, which cost nothing."""
    defined = free | set(closed.jaxpr.constvars)
    for eqn in closed.jaxpr.eqns:
        if all(isinstance(v, Literal) or v in defined for v in eqn.invars):
            defined.update(eqn.outvars)
        else:
            defined.update(v for v in eqn.outvars if _is_key(v))
    return defined - free


def keeps(activations: Activations) -> Keep:
    """Return which values a forward saves under an activation policy.

    Args:
        activations: `none` saves everything but gathered values, whose shards it saves instead; `dots` the results of
            matmuls with weights (no batch dims); `save_collectives` values reduced over devices; any other policy
            nothing. All save the results of `top_k`.
    """

    def keep(eqn: JaxprEqn) -> bool:
        name = eqn.primitive.name
        if activations == "none":
            return name != "all_gather"
        if activations == "dots" and name == "dot_general":
            return not eqn.params["dimension_numbers"][1][0]
        # A router's choices are always saved: recomputed, they could come out differently.
        reduced = activations == "save_collectives" and name.startswith(("psum", "pmax", "reduce_scatter"))
        return reduced or name == "top_k"

    return keep


def _size(atom: Any) -> int:
    return int(atom.aval.size)


def _width(atom: Any) -> int:
    return int(atom.aval.dtype.itemsize)


def _is_key(atom: Any) -> bool:
    return bool(jax.numpy.issubdtype(atom.aval.dtype, jax.dtypes.prng_key))
