"""Types of what branches and loops give: over time, where a carried value keeps its type, and over rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.backend.dependence.row_rules import of_round
from axonn_jax.backend.dependence.row_types import (
    BESIDE_ROWS,
    BY_PLACE,
    EACH_ROUND,
    NO_AXES,
    Rows,
    RowType,
    Running,
    Same,
    Sum,
    Told,
    coupled,
    either,
    unknown,
)
from axonn_jax.backend.jaxprs import bodies

CALLED = frozenset(
    {"checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"}
    | {"scan", "while"}
)
"""Primitives that run programs."""

Values = list["Value"]


@dataclass(frozen=True)
class Value:
    """Value of both programs, by its type."""

    type: RowType
    key: Any
    """Name: equal names have equal values."""
    of_model: bool = False
    """True if it depends on parameters, state or a draw."""
    origin: str = ""
    """Primitive, and the user's own line, that first used a sum over rows otherwise than linearly."""


class Loops(ABC):
    """Reading of branches and loops, by that of the programs that they run."""

    @abstractmethod
    def body(self, whole: Any, part: Any, values: Sequence[Value], consts: tuple[Any, Any] = ((), ())) -> Values:
        """Return the values that two programs return, of the values that they are given."""

    @abstractmethod
    def name(self, *parts: Any) -> int:
        """Return the name of a value by what it is computed from: equal ones have equal values."""

    def cond(self, eqn: Any, given: Values, pairs: Sequence[Any]) -> Values:
        """Return the values of a branch: of all branches, where the choice is not known."""
        by, operands = given[0], given[1:]
        if isinstance(by.type, Same) and by.type.value is not None:
            whole, part = pairs[int(by.type.value)]
            return self.body(whole.jaxpr, part.jaxpr, operands, (whole.consts, part.consts))
        runs = [self.body(w.jaxpr, p.jaxpr, operands, (w.consts, p.consts)) for w, p in pairs]
        of_model = any(each.of_model for each in given)
        kinds = [either([each.type for each in branch]) for branch in zip(*runs, strict=True)]
        if isinstance(by.type, Rows) and by.type.axis == EACH_ROUND:
            kinds = [kind if isinstance(kind, Told) else of_round((by.type, kind)) for kind in kinds]
        elif isinstance(by.type, Told):
            kinds = [by.type] * len(kinds)
        elif not isinstance(by.type, Same):
            kinds = [coupled("a branch that a number of all rows chooses")] * len(kinds)
        return [Value(kind, self.name("cond", id(eqn), at), of_model) for at, kind in enumerate(kinds)]

    def while_loop(self, eqn: Any, given: Values, pairs: Sequence[Any]) -> Values:
        """Return what a loop carries, whose rounds no row may decide."""
        of_cond, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        (cond, other_cond), (body, other_body) = pairs
        consts, carry = given[of_cond : of_cond + of_body], given[of_cond + of_body :]

        def again(carry: Values) -> Values:
            return self.body(body.jaxpr, other_body.jaxpr, [*consts, *carry], (body.consts, other_body.consts))

        carry = self._settled(eqn, carry, again)
        asks = self.body(cond.jaxpr, other_cond.jaxpr, [*given[:of_cond], *carry], (cond.consts, other_cond.consts))[
            0
        ].type
        if isinstance(asks, Rows) and asks.axis == EACH_ROUND:
            return [replace(v, type=of_round((asks, v.type))) if not isinstance(v.type, Told) else v for v in carry]
        if not isinstance(asks, Same) or asks.degree:
            fault = asks if isinstance(asks, Told) else coupled("a loop whose rounds rows decide")
            if isinstance(asks, Told):
                fault = replace(asks, reason=f"{asks.reason}, which decides how often a loop runs")
            return [replace(each, type=fault) for each in carry]
        return carry

    def _settled(self, eqn: Any, carry: Values, again: Callable[[Values], Values]) -> Values:
        """Return what a loop carries when another round changes no type."""
        carry = [_bare(value, self.name("carry", id(eqn), at)) for at, value in enumerate(carry)]
        for _ in range(_ROUNDS):
            after = again(carry)
            joint = [
                _bare(replace(a, type=either((a.type, b.type)), of_model=a.of_model or b.of_model), a.key)
                for a, b in zip(carry, after, strict=True)
            ]
            if joint == carry:
                return carry
            carry = joint
        return [replace(value, type=unknown("a loop")) for value in carry]

    def scan(self, eqn: Any, other: Any, given: Values, pair: tuple[Any, Any]) -> Values:
        """Return what a loop of a known length carries, and the stacks that it makes."""
        body, other_body = pair
        consts_count, carry_count = eqn.params["num_consts"], eqn.params["num_carry"]
        consts, carry = given[:consts_count], given[consts_count : consts_count + carry_count]
        stacks = given[consts_count + carry_count :]

        def once(carry: Values, slices: Values) -> Values:
            return self.body(body.jaxpr, other_body.jaxpr, [*consts, *carry, *slices], (body.consts, other_body.consts))

        if eqn.params["length"] != other.params["length"]:
            return self._over_rows(eqn, carry, stacks, once)
        slices = [replace(each, type=_slice_of(each.type), key=self.name("slice", each.key)) for each in stacks]
        last: Values = []

        def again(carry: Values) -> Values:
            nonlocal last
            out = once(carry, slices)
            last = out[carry_count:]
            return out[:carry_count]

        carry = self._settled(eqn, carry, again)
        again(carry)
        grown = [replace(v, type=_stacked(v.type), key=self.name("ys", id(eqn), at)) for at, v in enumerate(last)]
        return [*carry, *grown]

    def _over_rows(self, eqn: Any, carry: Values, stacks: Values, once: Callable[..., Values]) -> Values:
        """Return the values of a loop over rows: of what it adds up the sums, of the others an entry a row."""
        layouts = [
            replace(t, degree=0.0, divisor=None, columns=NO_AXES) for v in stacks if isinstance(t := v.type, Rows)
        ]
        row = layouts[0] if layouts else Rows(0)
        if row.axis != 0 or any(each != row for each in layouts):
            return [Value(unknown("a loop over rows of several layouts"), None)] * len(eqn.outvars)
        one = Rows(EACH_ROUND)  # one row, or group of rows, whichever its place

        def of(kind: RowType) -> RowType:
            if isinstance(kind, Rows):
                return replace(one, degree=kind.degree, divisor=kind.divisor)
            if isinstance(kind, Same) and 0 in kind.varies:
                return BY_PLACE
            if isinstance(kind, Same) and 0 in kind.drawn:
                return one
            return _slice_of(kind)

        slices = [replace(each, type=of(each.type), key=self.name("slice", each.key)) for each in stacks]
        body = next(bodies(eqn))
        start = eqn.params["num_consts"]
        inside = [body.invars[start + at] is body.outvars[at] for at in range(len(carry))]
        carried = [_bare(v, self.name("carry", id(eqn), at)) for at, v in enumerate(carry)]
        first_round = [
            value if kept else replace(value, type=one if _is_key(var) else Running(at))
            for at, (value, kept, var) in enumerate(zip(carried, inside, body.invars[start:], strict=False))
        ]
        out = once(first_round, slices)
        kinds: list[RowType] = []
        for at, (value, kept) in enumerate(zip(carry, inside, strict=True)):
            after = out[at].type
            zero = isinstance(value.type, Same) and value.type.value == 0
            if kept:
                kinds.append(carried[at].type)
            elif after == Running(at):
                kinds.append(
                    Sum(base=self.name("total", id(eqn), at)) if zero else coupled("a sum that begins elsewhere")
                )
            else:
                kinds.append(after if isinstance(after, Told) else coupled("what a loop over rows carries"))
        grown = [_row_by_row(each.type, row) for each in out[len(carry) :]]
        return [Value(kind, self.name("over", id(eqn), at), True) for at, kind in enumerate([*kinds, *grown])]


def _bare(value: Value, key: Any) -> Value:
    """Return what a loop carries, of which a number is another in the next round."""
    kind = value.type
    if isinstance(kind, Same):
        kind = replace(kind, value=None, place=None, columns=NO_AXES)
    if isinstance(kind, Sum):
        kind = replace(kind, base=key)
    return replace(value, type=kind, key=key)


def _slice_of(kind: RowType) -> RowType:
    """Return the type of an entry of a stack that a loop reads."""
    if isinstance(kind, Same):
        varies, drawn = (frozenset(axis - 1 for axis in axes if axis) for axes in (kind.varies, kind.drawn))
        return Same(varies, drawn, kind.degree, value=kind.value)
    if isinstance(kind, Rows):
        return coupled("rows one by one") if kind.axis == 0 else replace(kind, axis=kind.axis - 1, columns=NO_AXES)
    return kind


def _stacked(kind: RowType) -> RowType:
    """Return the type of a stack of what rounds of a loop give."""
    if isinstance(kind, Same):
        varies = frozenset({0, *(axis + 1 for axis in kind.varies)})
        return Same(varies, frozenset(axis + 1 for axis in kind.drawn), kind.degree)
    if isinstance(kind, Rows):
        return replace(kind, axis=kind.axis + 1, columns=NO_AXES)
    return replace(kind, scalar=False) if isinstance(kind, Sum) else kind


def _row_by_row(kind: RowType, row: Rows) -> RowType:
    """Return the type of a stack of what a loop over rows gives."""
    if isinstance(kind, Rows) and kind.axis == EACH_ROUND:
        return replace(row, degree=kind.degree, divisor=kind.divisor)
    if isinstance(kind, Same):
        return Same(
            frozenset(axis + 1 for axis in kind.varies), frozenset(axis + 1 for axis in kind.drawn), kind.degree
        )
    return (
        coupled("a running sum over rows")
        if isinstance(kind, Running)
        else kind
        if isinstance(kind, Told)
        else BESIDE_ROWS
    )


def _is_key(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key))


_ROUNDS = 8
"""Rounds after which a loop's types have settled, or are not understood."""
