"""Type inference over a loss that is traced twice, for all rows of a batch and for the rows of one part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from axonn_jax.any_flax.dependence.equation import Equation, by_rows
from axonn_jax.any_flax.dependence.row_derivatives import derivative_fault
from axonn_jax.any_flax.dependence.row_loops import CALLED, Loops, Value, Values
from axonn_jax.any_flax.dependence.row_rules import DRAWS, SHARED, types_of, wide
from axonn_jax.any_flax.dependence.row_types import (
    BY_COUNT,
    BY_PLACE,
    MISALIGNED,
    Fault,
    Number,
    Rows,
    Same,
    Sum,
    unknown,
)
from axonn_jax.core.backend.jaxprs import bodies, users_line


class Walk(Loops):
    """Walk over two traced programs in lockstep.

    Args:
        rows: Number of rows of the batch, and of a part.
        shared_axis: Name of the axis over which a layer such as BatchNorm computes statistics of all parts.
    """

    def __init__(self, rows: tuple[int, int], shared_axis: str):
        self.rows, self._shared_axis = rows, shared_axis
        self.statistics = False
        """True once a layer computes statistics of all parts together."""
        self._names: dict[Any, int] = {}
        self._derivatives = True

    def name(self, *parts: Any) -> int:
        """Return the number of a value, hash-consed from what it is computed from: equal numbers have equal values."""
        return self._names.setdefault(parts, len(self._names))

    def run(self, full: ClosedJaxpr, part: ClosedJaxpr, values: Sequence[Value]) -> Values:
        """Return the values of both programs' results from the values of their inputs."""
        return self.body(full.jaxpr, part.jaxpr, values, (full.consts, part.consts))

    def body(  # noqa: D102
        self, full: Any, part: Any, values: Sequence[Value], consts: tuple[Any, Any] = ((), ())
    ) -> Values:
        # The walk pairs equations by position, so a loss that branches in Python on the number of rows ends here.
        same = [eqn.primitive.name for eqn in full.eqns] == [eqn.primitive.name for eqn in part.eqns]
        if not same or len(full.outvars) != len(part.outvars):
            return [Value(unknown("another program for the rows of a part"), None)] * len(full.outvars)
        env = dict(zip(full.invars, values, strict=True))
        for at, pair in enumerate(zip(full.constvars, part.constvars, strict=True)):
            env[pair[0]] = self.constant(*(values[at] for values in consts)) if consts[0] else self._opaque(pair)

        def read(var: Any, other_var: Any) -> Value:
            return self.literal(var, other_var) if hasattr(var, "val") else env[var]

        for eqn, other_eqn in zip(full.eqns, part.eqns, strict=True):
            operands = [read(*pair) for pair in zip(eqn.invars, other_eqn.invars, strict=True)]
            env.update(zip(eqn.outvars, self._results(eqn, other_eqn, operands), strict=True))
        return [read(*pair) for pair in zip(full.outvars, part.outvars, strict=True)]

    def _opaque(self, pair: tuple[Any, Any]) -> Value:
        shapes = (pair[0].aval.shape, pair[1].aval.shape)
        return Value(Same(wide(shapes[0])) if shapes[0] == shapes[1] else BY_PLACE, self.name("const", id(pair[0])))

    def constant(self, value: Any, other: Any) -> Value:
        """Return the value of a constant of both programs."""
        key = self.name("const", id(value))
        shape = jnp.shape(value)
        if value is other or isinstance(value, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
            alike = shape == jnp.shape(other)
            return Value(Same(wide(shape)) if alike else unknown("a constant that is traced"), key)
        if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, other = jax.random.key_data(value), jax.random.key_data(other)
        a, b = np.asarray(value), np.asarray(other)
        # numpy's arange arrives as a constant, unlike jnp's iota, but is a row's index all the same.
        if a.ndim == 1 and a.shape != b.shape and all(np.array_equal(v, np.arange(len(v))) for v in (a, b)):
            return Value(Same(frozenset({0}), place=0), key)
        if a.shape != b.shape:
            uniform = a.size and b.size and (a == a.flat[0]).all() and (b == a.flat[0]).all()
            return Value(Same(value=float(a.flat[0])) if uniform else BY_PLACE, key)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            return self._literal_pair(a, b, key) if a.ndim == 0 else Value(BY_COUNT, key)
        return Value(Same(wide(shape)), key)

    def literal(self, var: Any, other: Any) -> Value:
        """Return the value of a number that stands in both programs."""
        if not hasattr(other, "val"):
            return Value(unknown("another program for the rows of a part"), None)
        return self._literal_pair(np.asarray(var.val), np.asarray(other.val), self.name("literal", str(var.val)))

    def _literal_pair(self, a: np.ndarray, b: np.ndarray, key: Any) -> Value:
        """Return a number's value, with its degree if it scales with the number of rows."""
        if a.ndim or (a.dtype.kind not in "biufV" and str(a.dtype) != "bfloat16"):
            return Value(Same(wide(a.shape)) if np.array_equal(a, b) else BY_COUNT, key)
        first, second = float(a), float(b)
        if first == second or (first != first and second != second):
            return Value(Same(value=first), key)
        # Python computes with len(batch) before tracing, so only the ratio of the two literals reveals the number of
        # rows; sqrt(len(batch)) has degree one half. The tolerance covers literals rounded to float32.
        for degree in (1.0, -1.0, 0.5, -0.5, 2.0, -2.0):
            if second and abs(first / second - (self.rows[0] / self.rows[1]) ** degree) < 1e-5 * abs(first / second):
                return Value(Same(degree=degree), key)
        return Value(BY_COUNT, key)

    def _results(self, eqn: Any, other: Any, operands: Values) -> Values:
        name, inner = eqn.primitive.name, list(bodies(eqn))
        results = [(a.aval.shape, b.aval.shape) for a, b in zip(eqn.outvars, other.outvars, strict=True)]
        of_model = any(operand.of_model for operand in operands) or name in DRAWS
        if name in CALLED and inner:
            out = self._called(name, eqn, other, operands)
        else:
            params = sorted((k, str(v)) for k, v in eqn.params.items() if k not in _IGNORED_PARAMS)
            keys = [operand.key for operand in operands]
            equation_key = self.name(name, *map(str, params), *keys)
            keyed = [
                keys[0] if name in _IDENTITIES and _lossless(eqn) else self.name(equation_key, at)
                for at in range(len(results))
            ]
            typed = Equation(
                name,
                (eqn.params, other.params),
                [operand.type for operand in operands],
                [(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, other.invars, strict=True)],
                results,
                [*(var.aval.dtype for var in eqn.invars), *(var.aval.dtype for var in eqn.outvars[:1])],
                keys,
                [operand.of_model for operand in operands],
                keyed[0] if keyed else None,
                self.rows,
            )
            try:
                types = types_of(typed, self._shared_axis)
            except (AssertionError, AttributeError, LookupError, TypeError, ValueError):
                # Rules read primitive parameters that are private to jax. If a later version renames one, fall back to
                # comparing numbers instead of failing the user's run.
                types = [unknown("its rule does not hold in this version of jax")] * len(results)
            summed = any(isinstance(operand.type, Sum) for operand in operands)
            self.statistics |= name in SHARED and summed and isinstance(types[0], Same)
            out = [Value(kind, key, of_model) for kind, key in zip(types, keyed, strict=True)]
        checked = []
        origin = next((operand.origin for operand in operands if operand.origin), "")
        for value, shapes in zip(out, results, strict=True):
            kind = value.type
            # Rules reason about one axis of rows. A second axis whose size follows the rows pairs rows with rows.
            if isinstance(kind, Rows) and by_rows(shapes) - {kind.axis}:
                kind = MISALIGNED
            if isinstance(kind, Sum) and by_rows(shapes) and not kind.scalar:
                kind = Number()  # summing these entries would count each sum once per row
            # Inside a library function there is no user line; the first enclosing call that has one fills it in.
            if isinstance(kind, Fault) and not kind.where:
                kind = replace(kind, primitive=kind.primitive or name, where=users_line(eqn))
            if isinstance(kind, Number) or getattr(kind, "divisor", None) is not None:
                origin = value.origin or origin or _origin_of(name, eqn)
                value = replace(value, origin=origin)
            checked.append(replace(value, type=kind))
        return checked

    def _called(self, name: str, eqn: Any, other: Any, operands: Values) -> Values:
        pairs = list(zip(_closed(eqn), _closed(other), strict=False))
        if len(_closed(eqn)) != len(_closed(other)):
            return [Value(unknown("another program for the rows of a part"), None)] * len(eqn.outvars)
        if name == "scan":
            return self.scan(eqn, other, operands, pairs[0])
        if name == "while":
            return self.while_loop(eqn, operands, pairs)
        if name == "cond":
            return self.cond(eqn, operands, pairs)
        full, part = pairs[0]
        out = self.body(full.jaxpr, part.jaxpr, operands, (full.consts, part.consts))
        if name in ("custom_jvp_call", "custom_vjp_call") and self._derivatives:
            # A backward pass is not differentiated again, so custom rules inside it are not checked.
            self._derivatives = False
            fault = derivative_fault(eqn, other, operands, out, self.run, self.name)
            self._derivatives = True
            if fault is not None:
                return [Value(fault, value.key, value.of_model) for value in out]
        return out


def _closed(eqn: Any) -> list[ClosedJaxpr]:
    """Return the programs that an equation calls; for a loop, the condition first."""
    if eqn.primitive.name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    if eqn.primitive.name == "cond":
        return list(eqn.params["branches"])
    name = next(param for param in ("jaxpr", "call_jaxpr", "fun_jaxpr") if param in eqn.params)
    inner = eqn.params[name]
    return [inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())]


def _origin_of(name: str, eqn: Any) -> str:
    line = users_line(eqn)
    return f"{name}, {line}" if line else ""


def _lossless(eqn: Any) -> bool:
    """True for a conversion that changes no value beyond rounding: from a mask or integers, or between floats."""
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return not jnp.issubdtype(old, jnp.inexact) or jnp.issubdtype(new, jnp.inexact)


_IGNORED_PARAMS = frozenset({"sharding", "out_sharding"})
"""Parameters that do not change values."""
_IDENTITIES = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient", "reduce_precision"})
"""Primitives whose result keeps the name of its operand, so that a count stays recognizable behind a cast."""
