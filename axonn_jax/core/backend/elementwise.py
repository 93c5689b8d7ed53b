"""Dependence analysis of a traced program: what some of its results compute, and whether it acts element by element.

Trying a function on numbers covers one input and the branches it takes. The traced program contains every branch and
every state, so a value that it does not read cannot influence a result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import ArrayLike

from axonn_jax.core import compat
from axonn_jax.core.backend.jaxprs import bodies, follow, same_body

_UNIFORM, _ALIGNED, _MIXED = range(3)
"""Kinds of values, ordered so that the kind of a combination is the maximum: independent of the elements; one entry per
element of the parameter, computed from that element alone; and everything else."""

ELEMENTWISE = frozenset(
    {"abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp"}
    | {"convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp"}
    | {"exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic"}
    | {"lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "pvary", "reduce_precision", "rem"}
    | {"round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin"}
    | {"sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"}
)
"""Primitives whose every result element depends only on the operands' elements at the same position."""
_FORMS = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
"""Primitives that only reshape their operand."""


@dataclass(frozen=True)
class Computation:
    """Text and constants of a traced program; jax names variables in order, so equal programs print equal texts."""

    text: str
    constants: tuple[ArrayLike, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Computation) or self.text != other.text:
            return False
        pairs = zip(self.constants, other.constants, strict=True)
        return len(self.constants) == len(other.constants) and all(np.array_equal(a, b) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


def computation(
    function: Callable[..., object], *arguments: object, of: Callable[[tuple[object, ...]], bool]
) -> Computation:
    """Trace a function and keep only the computation of the results that `of` selects.

    Equal computations give equal results for every input.

    Args:
        function: The function to trace.
        arguments: Its arguments, of which only shapes and dtypes matter.
        of: Predicate on the pytree path of a result.

    Returns:
        The pruned program, comparable with `==`.
    """
    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(results)[0]]
    closed = compat.part_of(closed, [of(path) for path in paths])
    return Computation(str(closed.jaxpr), tuple(closed.consts))


def by_element(function: Callable[..., object], *arguments: object, shape: tuple[int, ...]) -> bool:
    """Return whether a function acts element by element, so that it may run on any slice of its elements.

    Results of the shape must depend, at every entry, on that entry of the arguments alone; all other results must not
    depend on the elements at all. Values that are drawn or counted by position do not qualify, because positions differ
    in a slice.

    Args:
        function: The function to trace.
        arguments: Its arguments: arrays of the shape, with one entry per element, or of a single number.
        shape: Shape of the elements.

    Returns:
        True if that can be read off the program; False if it is not the case or not known.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    # A captured array has entries by position, which a slice would not get.
    if any(np.size(value) > 1 for value in closed.consts):
        return False

    def kind(aval: Any) -> int:
        return _ALIGNED if aval.shape == shape else _UNIFORM if aval.size == 1 else _MIXED

    def through(eqn: JaxprEqn, kinds: list[int]) -> Sequence[int]:
        return _through(eqn, kinds, shape, through)

    result_kinds = follow(closed.jaxpr, [kind(var.aval) for var in closed.jaxpr.invars], _UNIFORM, through)
    pairs = zip(result_kinds, (var.aval.shape == shape for var in closed.jaxpr.outvars), strict=True)
    return all(result_kind <= (_ALIGNED if is_aligned else _UNIFORM) for result_kind, is_aligned in pairs)


def _through(
    eqn: Any, kinds: list[int], shape: tuple[int, ...], through: Callable[[JaxprEqn, list[int]], Sequence[int]]
) -> Sequence[int]:
    """Return the kinds of an equation's results; an unknown primitive is assumed to mix elements."""
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
    # A result of the parameter's shape that reads no element, such as an iota or a draw, still differs between slices;
    # only a broadcast number, handled above, does not.
    return [_MIXED if worst or (var.aval.shape == shape and shape) else _UNIFORM for var in eqn.outvars]
