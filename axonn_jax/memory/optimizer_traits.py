"""Traits of an optimizer, read off its traced step: elementwise, one parameter at a time, and its state's owners."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, tree_map_with_path
from optax import GradientTransformation, GradientTransformationExtraArgs, with_extra_args_support

from axonn_jax.backend.dependence.elements import Computation, by_element, computation
from axonn_jax.errors import UserError

_OF_MASKS = (KeyError, IndexError, AttributeError, TypeError, ValueError)
"""Errors of a mask that has all parameters' names, where only part of them is given."""
_MASKS = "one whose masks and labels are functions of the parameters that it is given"

Arrays = Mapping[str, Any]


def owner(path: tuple[Any, ...], names: Iterable[str]) -> str | None:
    """Return the parameter among `names` to which a leaf of an optax state belongs, by its path; None: to all."""
    return next((key.key for key in reversed(path) if isinstance(key, DictKey) and key.key in names), None)


def updated(optimizer: GradientTransformation, grads: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
    """Return updates and state after a step; `value` is the loss, for transformations that ask for it."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
        return with_extra_args_support(optimizer).update(grads, state, params, value=value)


_DRIVEN = (
    "an optax transformation of gradients and parameters, which may ask for the loss as `value`, no more; its masks "
    "and labels are of the parameters' own tree"
)


def check_optimizer_type(optimizer: Any) -> None:
    """Raise ``UserError`` for what is no optax transformation."""
    if isinstance(optimizer, optax.MultiSteps):
        raise UserError("optimizer", "MultiSteps", "the transformation inside it, with microbatches= for its steps")
    if not isinstance(optimizer, GradientTransformation):
        # An nnx.Optimizer and a TrainState have the transformation in them.
        accepted = "its .tx, as optax made it" if hasattr(optimizer, "tx") else _DRIVEN
        raise UserError("optimizer", type(optimizer).__name__, accepted)


def check_update(optimizer: GradientTransformation, params: Arrays) -> None:
    """Raise ``UserError`` naming the transformation that `updated` cannot drive; tried on shapes."""
    check_optimizer_type(optimizer)
    if (error := _failure(optimizer, params)) is not None:
        faulty = [_name(link) for link in _links(optimizer) if _failure(link, params) is not None]
        reason = (str(error).splitlines() or [""])[0]
        shown = ", ".join(faulty) or _name(optimizer)
        raise UserError("optimizer", shown, f"{_DRIVEN} ({type(error).__name__}: {reason})") from error


def _failure(optimizer: GradientTransformation, params: Arrays) -> Exception | None:
    """Return the exception of a first step with such parameters, None without one."""
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in params.items()}

    def step(params: Any, value: Any) -> Any:
        return updated(optimizer, params, optimizer.init(params), params, value)

    try:
        jax.eval_shape(step, shapes, jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:  # of a stranger's code
        return error
    return None


def check_separable(optimizer: GradientTransformation, params: Arrays, own: Iterable[str]) -> None:
    """Raise ``UserError`` if the update of a stage's own parameters depends on parameters it does not hold.

    It does not where an optimizer of the own ones alone computes what that of all computes of them: read off the traced
    updates, so that what shows late, or where parameters have moved, is seen too. Of the parameters shapes are enough.
    """
    own = set(own)
    if len(own) == len(params):
        return
    shapes = {name: p.shape for name, p in params.items()}
    if not _alike(optimizer, shapes, {name: shapes[name] for name in shapes if name in own}):
        raise UserError(
            "optimizer", f"{_who(optimizer, shapes)}, a transformation that looks at all parameters together",
            "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
            "all; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip


def check_offload(optimizer: GradientTransformation, where: str, params: Arrays) -> bool:
    """Return True if every element is updated by itself; if not, every parameter must be.

    Read off the traced updates of two parameters of each kind that it treats alike. Raises ``UserError`` naming the
    transformation that looks at all parameters together; `where` names the option that needs it.
    """
    shapes = _probed(optimizer, params)
    if not _by_parameter(optimizer, shapes):
        raise UserError(
            "optimizer", _who(optimizer, dict(shapes)),
            f"a transformation that treats every parameter by itself with {where}, which has a bucket of them at a "
            "time; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip
    return all(_by_element(optimizer, name, shape) for name, shape in shapes)


def traced_update(optimizer: GradientTransformation, params: Arrays) -> tuple[str, list[Any]]:
    """Return the computation of an optimizer's step for such parameters, as text and constants.

    Raises ``UserError`` where it does not take them without the others.
    """
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}

    def step(params: Any, grads: Any, value: Any) -> Any:
        return updated(optimizer, grads, optimizer.init(params), params, value)

    try:
        closed = jax.make_jaxpr(step)(shapes, shapes, jax.ShapeDtypeStruct((), jnp.float32))
    except _OF_MASKS as error:
        raise UserError("optimizer", "a transformation that does not take layers one by one", _MASKS) from error
    return str(closed.jaxpr), closed.consts


def same_update(first: tuple[str, list[Any]], second: tuple[str, list[Any]]) -> bool:
    """True if two traces are of the same computation."""
    (text, constants), (text_2, constants_2) = first, second
    same = text == text_2 and len(constants) == len(constants_2)
    return same and all(np.array_equal(a, b) for a, b in zip(constants, constants_2, strict=True))


def treatments(optimizer: GradientTransformation, params: Arrays) -> dict[str, int]:
    """Numbers by parameter, the same where the optimizer does the same with them whatever their names."""
    known: list[tuple[str, list[Any]]] = []
    numbers = {}
    for name, p in params.items():
        traced = traced_update(optimizer, {name: p})
        number = next((at for at, earlier in enumerate(known) if same_update(traced, earlier)), len(known))
        if number == len(known):
            known.append(traced)
        numbers[name] = number
    return numbers


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of probes."""


def _probed(optimizer: GradientTransformation, params: Arrays) -> Shapes:
    """Return large parameters, two of each kind that an optimizer treats in a way of its own."""
    small: Any = {name: jax.ShapeDtypeStruct((2,) * len(p.shape), jnp.float32) for name, p in params.items() if p.shape}
    try:
        kinds = treatments(optimizer, small)
    except UserError:  # masks of all parameters' names
        kinds = {}
    first: dict[int, list[str]] = {}
    for name, kind in kinds.items():
        first.setdefault(kind, []).append(name)
    names = [name for alike in first.values() for name in alike[:2]]
    probes = tuple((name, _large(len(small[name].shape))) for name in names)
    return probes or (("matrix", _large(2)), ("matrix_2", _large(2)), ("vector", _large(1)))


def _large(dims: int, rows: int = 256) -> tuple[int, ...]:
    """Return a shape, large since adafactor is elementwise on small ones."""
    return (rows, 130)[:dims] if dims < 3 else (*(2,) * (dims - 2), rows, 130)


def _step(optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Any, tuple[Any, ...]]:
    """Return a step of an optimizer, its first state included, and the forms of its arguments."""
    params: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def step(params: Any, grads: Any, state: Any, value: Any) -> Any:
        return updated(optimizer, grads, state, params, value), optimizer.init(params)

    try:
        return step, (params, params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.float32))
    except _OF_MASKS as error:
        raise UserError("optimizer", "a transformation that does not take some parameters alone", _MASKS) from error


def _computed(
    optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]], of: Iterable[str]
) -> Computation:
    """Return what a step computes of some parameters: updates, state, and the state that belongs to none of all."""
    step, arguments = _step(optimizer, shapes)
    names = {*of}
    try:
        return computation(step, *arguments, of=lambda path: owner(path, shapes) in names | {None})
    except _OF_MASKS as error:
        raise UserError("optimizer", "a transformation that does not take some parameters alone", _MASKS) from error


def _alike(
    optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]], some: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return True if a step of all parameters computes of some what a step of these alone does."""
    return _computed(optimizer, shapes, some) == _computed(optimizer, some, some)


@lru_cache(maxsize=32)
def _by_parameter(optimizer: GradientTransformation, shapes: Shapes) -> bool:
    return all(_alike(optimizer, dict(shapes), {name: shape}) for name, shape in shapes)


@lru_cache(maxsize=64)
def _by_element(optimizer: GradientTransformation, name: str, shape: tuple[int, ...]) -> bool:
    """Return True if each element is updated by itself, whatever number of them there is."""
    step, arguments = _step(optimizer, {name: shape})
    if not by_element(step, *arguments, shape=shape):
        return False

    def text(of_shape: tuple[int, ...]) -> str:
        shown = ", ".join(map(str, of_shape))
        computed = _computed(optimizer, {name: of_shape}, [name]).text
        return computed.replace(shown, "shape").replace(shown.replace(" ", ""), "shape")

    return text(shape) == text(_large(len(shape), rows=384))  # a mean divides by a constant, the number of elements


def _who(optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the names of the transformations of a chain that look at all parameters together."""

    def looks_at_all(link: GradientTransformation) -> bool:
        try:
            return not _by_parameter(link, tuple(shapes.items()))
        except Exception:  # a link that a chain's others feed, as with a value
            return False

    return ", ".join(_name(link) for link in _links(optimizer) if looks_at_all(link)) or _name(optimizer)


def _links(optimizer: GradientTransformation) -> Iterator[GradientTransformation]:
    """Return the transformations that a chain consists of, or the single one."""
    held, first = (inspect.getclosurevars(f).nonlocals for f in (optimizer.update, optimizer.init))
    if isinstance(inner := held.get("tx"), GradientTransformation):
        yield from _links(inner)
    elif "update_fns" in held and "init_fns" in first:
        for init, update in zip(first["init_fns"], held["update_fns"], strict=True):
            yield from _links(GradientTransformationExtraArgs(init, update))
    else:
        yield optimizer


def _name(optimizer: GradientTransformation) -> str:
    """Name of the function that made the transformation: optax's functions return closures named after them."""
    inner = inspect.getclosurevars(optimizer.update).nonlocals.get("tx")
    if isinstance(inner, GradientTransformation):
        return _name(inner)
    return str(optimizer.update.__qualname__).split(".")[0]


def with_hyperparams(state: Any, numbers: Mapping[str, float]) -> Any:
    """Return an optimizer's state with other numbers of `optax.inject_hyperparams`; raises ``UserError`` for others."""
    kept = set[str]()
    for name, number in numbers.items():
        if not isinstance(number, int | float):
            raise UserError(name, number, "a number")

    def replaced(path: Any, leaf: Any) -> Any:
        if len(path) < 2 or getattr(path[-2], "name", None) != "hyperparams":
            return leaf
        kept.add(name := path[-1].key)
        return jax.device_put(np.asarray(numbers.get(name, leaf), leaf.dtype), leaf.sharding)

    state = tree_map_with_path(replaced, state)
    for name in numbers.keys() - kept:
        raise UserError("set", name, ", ".join(sorted(kept)) or "none; optax.inject_hyperparams keeps them")
    return state
