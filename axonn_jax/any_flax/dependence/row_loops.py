"""Typing of branches and loops, both loops of a fixed length and loops over the rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.any_flax.dependence.row_rules import loop_row_type
from axonn_jax.any_flax.dependence.row_types import (
    BY_PLACE,
    LOOP_AXIS,
    MISALIGNED,
    NO_AXES,
    Fault,
    Rows,
    RowType,
    Running,
    Same,
    Sum,
    coupled,
    either,
    unknown,
)
from axonn_jax.core.backend.jaxprs import bodies

CALLED = frozenset(
    {"checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"}
    | {"scan", "while"}
)
"""Primitives that call other programs."""

Values = list["Value"]


@dataclass(frozen=True)
class Value:
    """A value of both programs, described by its type."""

    type: RowType
    key: Any
    """Name: equal names have equal values."""
    of_model: bool = False
    """True if it depends on parameters, state or random draws."""
    origin: str = ""
    """Primitive and user's source line that first used a sum over rows nonlinearly."""


class Loops(ABC):
    """Typing of branches and loops in terms of the typing of their bodies."""

    @abstractmethod
    def body(self, full: Any, part: Any, values: Sequence[Value], consts: tuple[Any, Any] = ((), ())) -> Values:
        """Return the values of both programs' results from the values of their inputs."""

    @abstractmethod
    def name(self, *parts: Any) -> int:
        """Return the number of a value, hash-consed from what it is computed from: equal numbers have equal values."""

    def cond(self, eqn: Any, operands: Values, pairs: Sequence[Any]) -> Values:
        """Return the values of a branch, merged over all branches unless the predicate is a known constant."""
        predicate, branch_operands = operands[0], operands[1:]
        if isinstance(predicate.type, Same) and predicate.type.value is not None:
            full, part = pairs[int(predicate.type.value)]
            return self.body(full.jaxpr, part.jaxpr, branch_operands, (full.consts, part.consts))
        runs = [self.body(w.jaxpr, p.jaxpr, branch_operands, (w.consts, p.consts)) for w, p in pairs]
        of_model = any(operand.of_model for operand in operands)
        kinds = [either([operand.type for operand in branch]) for branch in zip(*runs, strict=True)]
        # Inside a loop over rows, a branch that one row decides is still a function of that row.
        if isinstance(predicate.type, Rows) and predicate.type.axis == LOOP_AXIS:
            kinds = [kind if isinstance(kind, Fault) else loop_row_type((predicate.type, kind)) for kind in kinds]
        elif isinstance(predicate.type, Fault):
            kinds = [predicate.type] * len(kinds)
        elif not isinstance(predicate.type, Same):
            kinds = [coupled("a branch that a number of all rows chooses")] * len(kinds)
        return [Value(kind, self.name("cond", id(eqn), at), of_model) for at, kind in enumerate(kinds)]

    def while_loop(self, eqn: Any, operands: Values, pairs: Sequence[Any]) -> Values:
        """Return the final carry of a while loop; the number of iterations must not depend on rows."""
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        (cond, other_cond), (body, other_body) = pairs
        consts, carry = operands[of_cond : of_cond + of_body], operands[of_cond + of_body :]

        def iterate(carry: Values) -> Values:
            return self.body(body.jaxpr, other_body.jaxpr, [*consts, *carry], (body.consts, other_body.consts))

        carry = self._fixed_point(eqn, carry, iterate)
        condition = self.body(
            cond.jaxpr, other_cond.jaxpr, [*operands[:of_cond], *carry], (cond.consts, other_cond.consts)
        )[0].type
        if isinstance(condition, Rows) and condition.axis == LOOP_AXIS:
            return [
                replace(v, type=loop_row_type((condition, v.type))) if not isinstance(v.type, Fault) else v
                for v in carry
            ]
        if not isinstance(condition, Same) or condition.degree:
            fault = condition if isinstance(condition, Fault) else coupled("a loop whose rounds rows decide")
            if isinstance(condition, Fault):
                fault = replace(condition, reason=f"{condition.reason}, which decides how often a loop runs")
            return [replace(value, type=fault) for value in carry]
        return carry

    def _fixed_point(self, eqn: Any, carry: Values, iterate: Callable[[Values], Values]) -> Values:
        """Iterate the types of a loop's carry until they no longer change, and return the carry."""
        carry = [_as_carry(value, self.name("carry", id(eqn), at)) for at, value in enumerate(carry)]
        for _ in range(_MAX_ITERATIONS):
            outputs = iterate(carry)
            joint = [
                _as_carry(replace(a, type=either((a.type, b.type)), of_model=a.of_model or b.of_model), a.key)
                for a, b in zip(carry, outputs, strict=True)
            ]
            if joint == carry:
                return carry
            carry = joint
        return [replace(value, type=unknown("a loop")) for value in carry]

    def scan(self, eqn: Any, other: Any, operands: Values, pair: tuple[Any, Any]) -> Values:
        """Return the final carry of a scan and its stacked outputs."""
        body, other_body = pair
        consts_count, carry_count = eqn.params["num_consts"], eqn.params["num_carry"]
        consts, carry = operands[:consts_count], operands[consts_count : consts_count + carry_count]
        stacks = operands[consts_count + carry_count :]

        def run_body(carry: Values, slices: Values) -> Values:
            return self.body(body.jaxpr, other_body.jaxpr, [*consts, *carry, *slices], (body.consts, other_body.consts))

        if eqn.params["length"] != other.params["length"]:
            # The length follows the number of rows in this case only, so the scan runs over the rows themselves.
            return self._loop_over_rows(eqn, carry, stacks, run_body)
        slices = [replace(stack, type=_element_type(stack.type), key=self.name("slice", stack.key)) for stack in stacks]
        last: Values = []

        def iterate(carry: Values) -> Values:
            nonlocal last
            out = run_body(carry, slices)
            last = out[carry_count:]
            return out[:carry_count]

        carry = self._fixed_point(eqn, carry, iterate)
        iterate(carry)  # if the carry did not settle, the outputs must be marked faulty too
        stacked = [replace(v, type=_stack_type(v.type), key=self.name("ys", id(eqn), at)) for at, v in enumerate(last)]
        return [*carry, *stacked]

    def _loop_over_rows(self, eqn: Any, carry: Values, stacks: Values, run_body: Callable[..., Values]) -> Values:
        """Return the values of a scan over rows: a sum for each carry that only accumulates, rows for each output.

        Iterating to a fixed point would not do here: a carry that accumulates rows is a sum only at the end, so inside
        the body it is a `Running` total, which nothing but the same total may read.
        """
        layouts = [
            replace(t, degree=0.0, divisor=None, columns=NO_AXES) for v in stacks if isinstance(t := v.type, Rows)
        ]
        row = layouts[0] if layouts else Rows(0)
        if row.axis != 0 or any(value != row for value in layouts):
            return [Value(unknown("a loop over rows of several layouts"), None)] * len(eqn.outvars)
        entry = Rows(LOOP_AXIS)  # one row, or one group of rows, at any index

        def slice_type(kind: RowType) -> RowType:
            if isinstance(kind, Rows):
                return replace(entry, degree=kind.degree, divisor=kind.divisor)
            if isinstance(kind, Same) and 0 in kind.varies:
                return BY_PLACE
            if isinstance(kind, Same) and 0 in kind.drawn:
                return entry
            return _element_type(kind)

        slices = [replace(value, type=slice_type(value.type), key=self.name("slice", value.key)) for value in stacks]
        body = next(bodies(eqn))
        start = eqn.params["num_consts"]
        invariants = [body.invars[start + at] is body.outvars[at] for at in range(len(carry))]
        carried = [_as_carry(v, self.name("carry", id(eqn), at)) for at, v in enumerate(carry)]
        first_iteration = [
            value if invariant else replace(value, type=entry if _is_key(var) else Running(at))
            for at, (value, invariant, var) in enumerate(zip(carried, invariants, body.invars[start:], strict=False))
        ]
        out = run_body(first_iteration, slices)
        kinds: list[RowType] = []
        for at, (value, invariant) in enumerate(zip(carry, invariants, strict=True)):
            carry_type = out[at].type
            zero = isinstance(value.type, Same) and value.type.value == 0
            if invariant:
                kinds.append(carried[at].type)
            elif carry_type == Running(at):
                kinds.append(
                    Sum(base=self.name("total", id(eqn), at)) if zero else coupled("a sum that begins elsewhere")
                )
            else:
                kinds.append(carry_type if isinstance(carry_type, Fault) else coupled("what a loop over rows carries"))
        stacked = [_row_stack_type(value.type, row) for value in out[len(carry) :]]
        return [Value(kind, self.name("over", id(eqn), at), True) for at, kind in enumerate([*kinds, *stacked])]


def _as_carry(value: Value, key: Any) -> Value:
    """Return a value as a loop's carry: constants are forgotten, because they may change with every iteration."""
    kind = value.type
    if isinstance(kind, Same):
        kind = replace(kind, value=None, place=None, columns=NO_AXES)
    if isinstance(kind, Sum):
        kind = replace(kind, base=key)
    return replace(value, type=kind, key=key)


def _element_type(kind: RowType) -> RowType:
    """Return the type of one slice of an array that a scan iterates over."""
    if isinstance(kind, Same):
        varies, drawn = (frozenset(axis - 1 for axis in axes if axis) for axes in (kind.varies, kind.drawn))
        return Same(varies, drawn, kind.degree, value=kind.value)
    if isinstance(kind, Rows):
        return coupled("rows one by one") if kind.axis == 0 else replace(kind, axis=kind.axis - 1, columns=NO_AXES)
    return kind


def _stack_type(kind: RowType) -> RowType:
    """Return the type of a scan's stacked outputs."""
    if isinstance(kind, Same):
        varies = frozenset({0, *(axis + 1 for axis in kind.varies)})
        return Same(varies, frozenset(axis + 1 for axis in kind.drawn), kind.degree)
    if isinstance(kind, Rows):
        return replace(kind, axis=kind.axis + 1, columns=NO_AXES)
    return replace(kind, scalar=False) if isinstance(kind, Sum) else kind


def _row_stack_type(kind: RowType, row: Rows) -> RowType:
    """Return the type of the stacked outputs of a scan over rows."""
    if isinstance(kind, Rows) and kind.axis == LOOP_AXIS:
        return replace(row, degree=kind.degree, divisor=kind.divisor)
    if isinstance(kind, Same):
        return Same(
            frozenset(axis + 1 for axis in kind.varies), frozenset(axis + 1 for axis in kind.drawn), kind.degree
        )
    return (
        coupled("a running sum over rows")
        if isinstance(kind, Running)
        else kind
        if isinstance(kind, Fault)
        else MISALIGNED
    )


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


_MAX_ITERATIONS = 8
"""Passes over a loop's body before its types are given up as not understood."""
