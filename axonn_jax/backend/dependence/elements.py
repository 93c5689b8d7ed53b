"""Dependence, read off a traced program: what some of its results compute, and whether elements go by themselves.

A trial with numbers sees one input and the steps that it takes. The program has every branch, every state and every
step: what it does not read, no number can bring in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from axonn_jax import compat
from axonn_jax.backend.jaxprs import bodies, follow, same_body

_UNIFORM, _ALIGNED, _MIXED = range(3)
"""Kinds of values: the same whatever part of the parameter is given; an entry for each of its elements, which has seen
that element alone; and all others."""

ELEMENTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp"}
    | {"convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp"}
    | {"exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic"}
    | {"lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "pvary", "reduce_precision", "rem"}
    | {"round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"}
    | {"sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)
"""Primitives of which each element of the result comes from the same element of the operands."""
_FORMS = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
"""Primitives that show their operand in another shape."""


@dataclass(frozen=True)
class Computation:
    """Text and constants of a traced program, whose variables are named in their order: equal programs, equal texts."""

    text: str
    constants: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Computation) or self.text != other.text:
            return False
        pairs = zip(self.constants, other.constants, strict=True)
        return len(self.constants) == len(other.constants) and all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def computation(function: Callable[..., Any], *arguments: Any, of: Callable[[Any], bool]) -> Computation:
    """Return what a function computes of those results whose path `of` accepts; everything else is left out.

    Two functions that compute alike have equal computations. Equal ones compute the same for every input.
    """
    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]]
    closed = compat.part_of(closed, [of(path) for path in paths])
    return Computation(str(closed.jaxpr), tuple(closed.consts))


def by_element(function: Callable[..., Any], *arguments: Any, shape: tuple[int, ...]) -> bool:
    """Return True if a function's results of a shape have an entry for each element, which has seen that one alone.

    All other results must be the same for whatever part of the elements is given. Arguments of the shape have an entry
    for each element; arguments of one number are the same for all. What is drawn or counted by position is of no
    element, as a part has other positions.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    if any(np.size(value) > 1 for value in closed.consts):
        return False

    def kind(aval: Any) -> int:
        return _ALIGNED if aval.shape == shape else _UNIFORM if aval.size == 1 else _MIXED

    def through(eqn: Any, kinds: list[int]) -> Sequence[int]:
        return _through(eqn, kinds, shape, through)

    result_kinds = follow(closed.jaxpr, [kind(var.aval) for var in closed.jaxpr.invars], _UNIFORM, through)
    pairs = zip(result_kinds, (var.aval.shape == shape for var in closed.jaxpr.outvars), strict=True)
    return all(result_kind <= (_ALIGNED if is_aligned else _UNIFORM) for result_kind, is_aligned in pairs)


def _through(eqn: Any, kinds: list[int], shape: tuple[int, ...], through: Any) -> Sequence[int]:
    """Return the kinds of an equation's results; a primitive that is not known mixes the elements that it is given."""
    name, worst = eqn.primitive.name, max(kinds, default=_UNIFORM)
    if name == "cond":
        branches = [follow(body, kinds[1:], _UNIFORM, through) for body in bodies(eqn)]
        return [max(kinds[0] and _MIXED, *branch) for branch in zip(*branches, strict=True)]
    if name not in ("scan", "while") and (body := same_body(eqn)) is not None:
        return follow(body, kinds, _UNIFORM, through)
    if name in ELEMENTWISE:
        return [worst] * len(eqn.outvars)
    if name in _FORMS:
        operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
        keeps_places = operand.shape == result.shape or (
            worst == _UNIFORM and (operand.size == 1 or result.shape != shape)
        )
        return [worst if keeps_places else _MIXED]
    # Of the parameter's shape nothing but a repeated number is the same for every part: positions and draws are not.
    return [_MIXED if worst or (var.aval.shape == shape and shape) else _UNIFORM for var in eqn.outvars]
