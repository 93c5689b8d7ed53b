"""Programs of one row: jax writes some of its functions otherwise for an axis of size one, which changes no value."""

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from axonn_jax.any_flax.dependence.row_types import Fault
from axonn_jax.any_flax.dependence.row_walk import Walk
from axonn_jax.core import compat
from axonn_jax.core.backend.jaxprs import bodies, equations

Atom = Var | Literal
_JAX = str(Path(jax.__file__).parent)
_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
"""Primitives that only move values."""
_AXES = frozenset(
    {"axes", "axis", "broadcast_dimensions", "concatenate_dimension", "dimension", "dimension_numbers", "dimensions"}
    | {"permutation"}
)
"""Parameters that number axes; two of them are not alike because one is twice the other."""


def alike(program: ClosedJaxpr, other: ClosedJaxpr, rows: tuple[int, int]) -> bool:
    """Return whether two traces of a loss are one program, but for the number of rows and inside functions of jax.

    `jnp.take_along_axis` and `jnp.einsum`, for example, leave axes of size one out of gathers and products. A loss that
    itself does something else for one row, by `jnp.squeeze` or a branch in Python, is another program.

    Args:
        program: The loss of more rows.
        other: The loss of fewer rows.
        rows: Numbers of rows.
    """
    pair = _Pair(rows)
    if not pair.bodies_alike(program.jaxpr, other.jaxpr):
        return False
    constants = (pair.walk.constant(*values).type for values in zip(program.consts, other.consts, strict=True))
    return not any(isinstance(kind, Fault) for kind in constants)


class _Pair:
    """Comparison of two programs, one call of jax after the other."""

    def __init__(self, rows: tuple[int, int]):
        self.walk, self._ratio = Walk(rows, ""), rows[0] // rows[1]

    def bodies_alike(self, full: Jaxpr, part: Jaxpr) -> bool:
        """Return whether two programs make the same calls with corresponding values."""
        inputs = [[*side.invars, *side.constvars] for side in (full, part)]
        if len(inputs[0]) != len(inputs[1]):
            return False
        env: dict[Var, Var] = dict(zip(*inputs, strict=True))
        calls, other_calls = (deque(_calls(side)) for side in (full, part))
        while calls or other_calls:
            call, other = (side[0] if side else _NO_CALL for side in (calls, other_calls))
            if call.site == other.site:
                alike = self._calls_alike(calls.popleft(), other_calls.popleft(), env)
            elif call.moves:  # `jnp.broadcast_to` of one row to one row leaves nothing
                alike = self._moved(calls.popleft(), env)
            else:
                return False
            if not alike:
                return False
        return self._operands_alike(full.outvars, part.outvars, env)

    def _calls_alike(self, call: "_Call", other: "_Call", env: dict[Var, Var]) -> bool:
        names, other_names = ([eqn.primitive.name for eqn in side.eqns] for side in (call, other))
        inner, other_inner = ([var for eqn in side.eqns for var in eqn.outvars] for side in (call, other))
        if names == other_names and self._results_alike(inner, other_inner):
            return all(self._equations_alike(*each, env) for each in zip(call.eqns, other.eqns, strict=True))
        # One call of jax that is written otherwise: it computes the same from the same values.
        computed, other_computed = ([name for name in side if name not in _SHAPES] for side in (names, other_names))
        same = computed == other_computed and {env[var] for var in call.reads} == other.reads
        if not (same and self._results_alike(call.results, other.results)):
            return False
        env.update(zip(call.results, other.results, strict=True))
        return True

    def _moved(self, call: "_Call", env: dict[Var, Var]) -> bool:
        """Return whether a call that only one of the programs makes changes nothing in the other one."""
        if len(call.reads) != 1 or len(call.results) != 1:
            return False
        env[call.results[0]] = env[next(iter(call.reads))]
        return self._results_alike(call.results, [env[call.results[0]]])

    def _equations_alike(self, eqn: JaxprEqn, other: JaxprEqn, env: dict[Var, Var]) -> bool:
        """Return whether two equations of one primitive are alike, and note that their results correspond."""
        params = all(
            eqn.params[name] == other.params[name]
            if name in _AXES
            else self._sizes_alike(eqn.params[name], other.params[name])
            for name in eqn.params
        )
        same = params and self._operands_alike(eqn.invars, other.invars, env)
        inner = zip(bodies(eqn), bodies(other), strict=False)
        if not (same and self._results_alike(eqn.outvars, other.outvars)):
            return False
        env.update(zip(eqn.outvars, other.outvars, strict=True))
        return all((_of_jax(a) and _of_jax(b)) or self.bodies_alike(a, b) for a, b in inner)

    def _operands_alike(self, atoms: Sequence[Atom], others: Sequence[Atom], env: dict[Var, Var]) -> bool:
        def corresponds(a: Atom, b: Atom) -> bool:
            if isinstance(a, Literal):
                return isinstance(b, Literal) and not isinstance(self.walk.literal(a, b).type, Fault)
            return env[a] is b

        return len(atoms) == len(others) and all(map(corresponds, atoms, others))

    def _results_alike(self, results: Sequence[Var], others: Sequence[Var]) -> bool:
        shapes, other_shapes = ([getattr(var.aval, "shape", ()) for var in side] for side in (results, others))
        return self._sizes_alike(shapes, other_shapes)

    def _sizes_alike(self, a: object, b: object) -> bool:
        """Return whether parameters or shapes are equal, but for sizes that follow the rows."""
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            return len(a) == len(b) and all(map(self._sizes_alike, a, b))
        if isinstance(a, int) and isinstance(b, int):
            return a in (b, self._ratio * b)
        return not isinstance(a, str | frozenset) or a == b


class _Call(NamedTuple):
    """Equations of one call outside of jax."""

    site: object
    """Instruction of Python's that makes the call."""
    eqns: list[JaxprEqn]
    reads: set[Var]
    """Values that the equations read and do not compute."""
    results: list[Var]
    """Values that later calls read."""

    @property
    def moves(self) -> bool:
        """True if the call computes no value."""
        return bool(self.eqns) and all(eqn.primitive.name in _SHAPES for eqn in self.eqns)


_NO_CALL = _Call("none", [], set(), [])


def _calls(jaxpr: Jaxpr) -> list[_Call]:
    """Return the equations of a program call by call."""
    groups = [(site, list(eqns)) for site, eqns in groupby(jaxpr.eqns, lambda eqn: compat.call_site(eqn, _JAX))]
    reads = [_read(eqns) for _, eqns in groups]
    last_read = {var: number for number, each in enumerate(reads) for var in each}
    last_read |= {atom: len(groups) for atom in jaxpr.outvars if isinstance(atom, Var)}
    return [
        _Call(site, eqns, reads[number], [v for e in eqns for v in e.outvars if last_read.get(v, 0) > number])
        for number, (site, eqns) in enumerate(groups)
    ]


def _read(eqns: Sequence[JaxprEqn]) -> set[Var]:
    computed = {var for eqn in eqns for var in eqn.outvars}
    return {atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var)} - computed


def _of_jax(jaxpr: Jaxpr) -> bool:
    """True if jax's own code wrote all equations: what it computes does not depend on how it is written."""
    frames = (frame for eqn in equations(jaxpr) for frame in getattr(eqn.source_info.traceback, "frames", ()))
    return all(frame.file_name.startswith(_JAX) for frame in frames)
