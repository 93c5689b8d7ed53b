"""Traits of an optimizer read off its traced step: elementwise, per parameter, and which parameter owns which state."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, tree_map_with_path
from jax.typing import ArrayLike
from optax import GradientTransformation, GradientTransformationExtraArgs, with_extra_args_support

from axonn_jax.core.backend.elementwise import Computation, by_element, computation
from axonn_jax.core.errors import UserError

_MASK_ERRORS = (KeyError, IndexError, AttributeError, TypeError, ValueError)
"""Errors that a mask listing all parameters raises on a subset of them."""
_MASKS = "one whose masks and labels are functions of the parameters that it is given"

Arrays = Mapping[str, jax.Array | jax.ShapeDtypeStruct]


def owner(path: tuple[object, ...], names: Iterable[str]) -> str | None:
    """Return the parameter among `names` that a leaf of an optax state belongs to, by its path; None: to all."""
    # Innermost key first: labels of a partition may be dict keys too, and stand outside the parameter's name.
    return next((key.key for key in reversed(path) if isinstance(key, DictKey) and key.key in names), None)


def updated(
    optimizer: GradientTransformation,
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    value: jax.Array | None,
) -> tuple[optax.Updates, optax.OptState]:
    """Return updates and new state; `value` is the loss, for transformations that ask for it."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
        return with_extra_args_support(optimizer).update(grads, state, params, value=value)


_DRIVEN = (
    "an optax transformation of gradients and parameters, which may ask for the loss as `value`, no more; its masks "
    "and labels are of the parameters' own tree"
)


def check_optimizer_type(optimizer: object) -> None:
    """Raise ``UserError`` unless `optimizer` is an optax transformation."""
    if isinstance(optimizer, optax.MultiSteps):
        raise UserError("optimizer", "MultiSteps", "the transformation inside it, with microbatches= for its steps")
    if not isinstance(optimizer, GradientTransformation):
        # An nnx.Optimizer and a TrainState have the transformation in them.
        accepted = "its .tx, as optax made it" if hasattr(optimizer, "tx") else _DRIVEN
        raise UserError("optimizer", type(optimizer).__name__, accepted)


def check_update(optimizer: GradientTransformation, params: Arrays) -> None:
    """Raise ``UserError`` naming the transformation that `updated` cannot drive, found by an abstract step."""
    check_optimizer_type(optimizer)
    if (error := _failure(optimizer, params)) is not None:
        faulty = [_name(link) for link in _links(optimizer) if _failure(link, params) is not None]
        reason = (str(error).splitlines() or [""])[0]
        shown = ", ".join(faulty) or _name(optimizer)
        raise UserError("optimizer", shown, f"{_DRIVEN} ({type(error).__name__}: {reason})") from error


def _failure(optimizer: GradientTransformation, params: Arrays) -> Exception | None:
    """Return the exception of a first step on abstract parameters, or None."""
    shapes = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in params.items()}

    def step(params: optax.Params, value: jax.Array) -> Any:
        return updated(optimizer, params, optimizer.init(params), params, value)

    try:
        jax.eval_shape(step, shapes, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:  # user code may raise anything
        return error
    return None


def check_separable(optimizer: GradientTransformation, params: Arrays, subset: Iterable[str]) -> None:
    """Raise ``UserError`` if the update of the parameters in `subset` depends on any other parameter.

    Args:
        optimizer: Any optax transformation.
        params: All parameters by name; may be abstract.
        subset: Names of a stage's or a layer's parameters.
    """
    # Compare traces, not numbers of a trial step: a dependence may only show after many steps or for other weights.
    subset = set(subset)
    if len(subset) == len(params):
        return
    shapes = {name: p.shape for name, p in params.items()}
    if not _same_on_subset(optimizer, shapes, {name: shapes[name] for name in shapes if name in subset}):
        raise UserError(
            "optimizer", f"{_who(optimizer, shapes)}, a transformation that looks at all parameters together",
            "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
            "all; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip


def check_offload(optimizer: GradientTransformation, where: str, params: Arrays) -> bool:
    """Return True if every element is updated independently; otherwise every parameter must be.

    Args:
        optimizer: Any optax transformation.
        where: The option that requires it, for the message.
        params: Parameters by name; may be abstract.

    Raises:
        UserError: A transformation looks at all parameters together; the message names it.
    """
    shapes = _probed(optimizer, params)
    if not _by_parameter(optimizer, shapes):
        raise UserError(
            "optimizer", _who(optimizer, dict(shapes)),
            f"a transformation that treats every parameter by itself with {where}, which has a bucket of them at a "
            "time; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip
    return all(_by_element(optimizer, name, shape) for name, shape in shapes)


def traced_update(optimizer: GradientTransformation, params: Arrays) -> tuple[str, list[ArrayLike]]:
    """Return the computation of an optimizer's step for these parameters, as text and constants.

    Raises ``UserError`` if the optimizer does not take them without the remaining ones.
    """
    shapes = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}

    def step(params: optax.Params, grads: optax.Updates, value: jax.Array) -> Any:
        return updated(optimizer, grads, optimizer.init(params), params, value)

    try:
        closed = jax.make_jaxpr(step)(shapes, shapes, jax.ShapeDtypeStruct((), jnp.float32))
    except _MASK_ERRORS as error:
        raise UserError("optimizer", "a transformation that does not take layers one by one", _MASKS) from error
    return str(closed.jaxpr), closed.consts


def same_update(first: tuple[str, list[ArrayLike]], second: tuple[str, list[ArrayLike]]) -> bool:
    """Return True if two traces are of the same computation."""
    (text, constants), (text_2, constants_2) = first, second
    same = text == text_2 and len(constants) == len(constants_2)
    return same and all(np.array_equal(a, b) for a, b in zip(constants, constants_2, strict=True))


def treatments(optimizer: GradientTransformation, params: Arrays) -> dict[str, int]:
    """Return a number for each parameter, equal for those that the optimizer treats alike regardless of their names."""
    traces: list[tuple[str, list[ArrayLike]]] = []
    numbers = {}
    for name, p in params.items():
        new_trace = traced_update(optimizer, {name: p})
        number = next((index for index, trace in enumerate(traces) if same_update(new_trace, trace)), len(traces))
        if number == len(traces):
            traces.append(new_trace)
        numbers[name] = number
    return numbers


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of probes."""


def _probed(optimizer: GradientTransformation, params: Arrays) -> Shapes:
    """Return large parameters, two of each kind that an optimizer treats differently."""
    small = {name: jax.ShapeDtypeStruct((2,) * len(p.shape), jnp.float32) for name, p in params.items() if p.shape}
    try:
        kinds = treatments(optimizer, small)
    except UserError:  # masks that list all parameters
        kinds = {}
    first: dict[int, list[str]] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, []).append(name)
    # Two of a kind, since the check looks for updates that depend on a second parameter.
    names = [name for group in first.values() for name in group[:2]]
    probes = tuple((name, _large(len(small[name].shape))) for name in names)
    return probes or (("matrix", _large(2)), ("matrix_2", _large(2)), ("vector", _large(1)))


def _large(dims: int, rows: int = 256) -> tuple[int, ...]:
    # Large, since Adafactor does not factor small dims and would pass for elementwise.
    return (rows, 130)[:dims] if dims < 3 else (*(2,) * (dims - 2), rows, 130)


def _step(optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, tuple[object, ...]]:
    """Return a step of an optimizer, including its initial state, and its abstract arguments."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def step(params: optax.Params, grads: optax.Updates, state: optax.OptState, value: jax.Array) -> object:
        return updated(optimizer, grads, state, params, value), optimizer.init(params)

    try:
        return step, (params, params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.float32))
    except _MASK_ERRORS as error:
        raise UserError("optimizer", "a transformation that does not take some parameters alone", _MASKS) from error


def _computed(
    optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]], subset: Iterable[str]
) -> Computation:
    """Return what a step computes for `subset`: updates, state, and the state that no parameter owns."""
    step, arguments = _step(optimizer, shapes)
    names = {*subset}
    try:
        return computation(step, *arguments, of=lambda path: owner(path, shapes) in names | {None})
    except _MASK_ERRORS as error:
        raise UserError("optimizer", "a transformation that does not take some parameters alone", _MASKS) from error


def _same_on_subset(
    optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]], subset: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return True if a step of all parameters computes the same for `subset` as a step of `subset` alone."""
    return _computed(optimizer, shapes, subset) == _computed(optimizer, subset, subset)


@lru_cache(maxsize=32)
def _by_parameter(optimizer: GradientTransformation, shapes: Shapes) -> bool:
    return all(_same_on_subset(optimizer, dict(shapes), {name: shape}) for name, shape in shapes)


@lru_cache(maxsize=64)
def _by_element(optimizer: GradientTransformation, name: str, shape: tuple[int, ...]) -> bool:
    """Return True if each element is updated independently of the others and of how many there are."""
    step, arguments = _step(optimizer, {name: shape})
    if not by_element(step, *arguments, shape=shape):
        return False

    def text(of_shape: tuple[int, ...]) -> str:
        # Only whole integers are sizes: their digits may also stand in a learning rate, and a mean divides by 256.0.
        sizes = rf"(?<![\d.])({', ?'.join(map(str, of_shape))})(?![\d.])"
        return re.sub(sizes, "shape", _computed(optimizer, {name: of_shape}, [name]).text)

    # A mean shows only as division by a constant, the number of elements, so compare two sizes.
    return text(shape) == text(_large(len(shape), rows=384))


def _who(optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the names of a chain's transformations that look at all parameters together."""

    def looks_at_all(link: GradientTransformation) -> bool:
        try:
            return not _by_parameter(link, tuple(shapes.items()))
        except Exception:  # a link that depends on an earlier one, for example on its extra arguments
            return False

    return ", ".join(_name(link) for link in _links(optimizer) if looks_at_all(link)) or _name(optimizer)


def _links(optimizer: GradientTransformation) -> Iterator[GradientTransformation]:
    """Yield the transformations of a chain, or the single one."""
    # Optax does not expose a chain's members; they are closure variables of its functions.
    update_vars, init_vars = (inspect.getclosurevars(f).nonlocals for f in (optimizer.update, optimizer.init))
    if isinstance(inner := update_vars.get("tx"), GradientTransformation):
        yield from _links(inner)
    elif "update_fns" in update_vars and "init_fns" in init_vars:
        for init, update in zip(init_vars["init_fns"], update_vars["update_fns"], strict=True):
            yield from _links(GradientTransformationExtraArgs(init, update))
    else:
        yield optimizer


def _name(optimizer: GradientTransformation) -> str:
    """Return the name of the function that built a transformation; optax returns closures named after it."""
    inner = inspect.getclosurevars(optimizer.update).nonlocals.get("tx")
    if isinstance(inner, GradientTransformation):
        return _name(inner)
    return str(optimizer.update.__qualname__).split(".")[0]


def with_hyperparams(state: optax.OptState, numbers: Mapping[str, float]) -> optax.OptState:
    """Return an optimizer's state with some numbers of `optax.inject_hyperparams` replaced.

    Raises ``UserError`` for a name that the optimizer does not inject or a value that is no number.
    """
    hyperparams = set[str]()
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            raise UserError(name, number, "a number")

    def replaced(path: Any, leaf: jax.Array) -> object:
        if len(path) < 2 or getattr(path[-2], "name", None) != "hyperparams":
            return leaf
        hyperparams.add(name := path[-1].key)
        return jax.device_put(np.asarray(numbers.get(name, leaf), leaf.dtype), leaf.sharding)

    state = tree_map_with_path(replaced, state)
    for name in numbers.keys() - hyperparams:
        raise UserError("set", name, ", ".join(sorted(hyperparams)) or "none; optax.inject_hyperparams keeps them")
    return state
