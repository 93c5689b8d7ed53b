"""Traits of an optimizer: whether it treats elements or parameters one by one, and what its state belongs to."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey
from optax import GradientTransformation

from axonn_jax.errors import UserError

_SHAPES = {"matrix": (256, 130), "vector": (256,)}  # adafactor, for one, is elementwise on smaller ones
_SCALES = (1e-3, 1e3)
"""Of gradients, one after the other: Adam's first update does not depend on the scale."""

Arrays = Mapping[str, Any]


def owner(path: tuple[Any, ...], names: Iterable[str]) -> str | None:
    """The parameter among `names` that a leaf of an optax state belongs to, by its path; None: to all of them."""
    return next((key.key for key in reversed(path) if isinstance(key, DictKey) and key.key in names), None)


def check_separable(optimizer: GradientTransformation, params: Arrays, own: Iterable[str]) -> None:
    """Raises ``UserError`` if the update of a stage's own parameters depends on parameters it does not hold.

    Found out by trying: tiny arrays under all names, all at once and the own ones alone.
    """
    own = set(own)
    if len(own) == len(params):
        return
    tiny = {name: jnp.full((2,) * len(p.shape), 0.5, jnp.float32) for name, p in params.items()}
    grads = {name: (1 + i % 7) * value for i, (name, value) in enumerate(tiny.items())}
    parts = [{name: tree[name] for name in own} for tree in (tiny, grads)]
    together = [{name: step[name] for name in own} for step in _updates(optimizer, tiny, [grads] * len(_SCALES))]
    if not _close(together, _updates(optimizer, parts[0], [parts[1]] * len(_SCALES)), rtol=1e-5):
        raise UserError(
            "optimizer", "a transformation that looks at all parameters together",
            "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
            "all; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip


def check_offload(optimizer: GradientTransformation, where: str) -> bool:
    """Returns whether every element is updated by itself; if not, every parameter must be.

    Found out by trying: a matrix and a vector, each by itself and in two parts. Raises ``UserError`` with the name of
    what looks at all parameters together; `where` says what needs it.
    """
    if _splits(optimizer, _elements):
        return True
    if not _splits(optimizer, _parameters):
        faulty = [_name(link) for link in _links(optimizer) if not _splits(link, _parameters)]
        raise UserError(
            "optimizer", ", ".join(faulty) or _name(optimizer),
            f"a transformation that treats every parameter by itself with {where}, which has a bucket of them at a "
            "time; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip
    return False


def traced_update(optimizer: GradientTransformation, params: Arrays) -> tuple[str, list[Any]]:
    """Returns what an optimizer computes for such parameters at a step, as text and constants.

    Raises ``UserError`` where it does not take them without the others.
    """
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}

    def step(params: Any, grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)

    try:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            closed = jax.make_jaxpr(step)(shapes, shapes)
    except (KeyError, TypeError, ValueError) as error:  # as from a mask that has all parameters' names
        accepted = "one whose masks and labels are functions of the parameters that it is given"
        raise UserError("optimizer", "a transformation that does not take layers one by one", accepted) from error
    return str(closed.jaxpr), closed.consts


def same_update(first: tuple[str, list[Any]], second: tuple[str, list[Any]]) -> bool:
    """Whether two traces are of the same computation."""
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


def _elements(params: Arrays) -> list[Arrays]:
    return [{name: value[rows] for name, value in params.items()} for rows in (slice(0, 128), slice(128, 256))]


def _parameters(params: Arrays) -> list[Arrays]:
    return [{name: value} for name, value in params.items()]


def _splits(optimizer: GradientTransformation, divide: Callable[[Arrays], list[Arrays]]) -> bool:
    """Whether parts of parameters get the updates that they get as parts of the whole."""
    rng = np.random.default_rng(0)
    drawn = [{name: rng.normal(size=shape).astype(np.float32) for name, shape in _SHAPES.items()} for _ in range(3)]
    want = _updates(optimizer, drawn[0], drawn[1:])
    in_parts: list[dict[str, Any]] = [{} for _ in want]
    for params, *grads in zip(*map(divide, drawn), strict=True):
        for joined, part in zip(in_parts, _updates(optimizer, params, grads), strict=True):
            for name, value in part.items():
                joined[name] = np.concatenate([joined[name], value]) if name in joined else np.asarray(value)
    return _close(want, in_parts, rtol=1e-4, atol=1e-7)


def _close(want: Sequence[Arrays], have: Sequence[Arrays], *, rtol: float, atol: float = 0.0) -> bool:
    return all(
        np.allclose(a[name], b[name], rtol=rtol, atol=atol) for a, b in zip(want, have, strict=True) for name in a
    )


def _updates(
    optimizer: GradientTransformation, params: Arrays, directions: Sequence[Arrays]
) -> list[dict[str, jax.Array]]:
    return jax.jit(partial(_steps, optimizer))(params, directions)  # type: ignore[no-any-return]


def _steps(optimizer: GradientTransformation, params: Any, directions: Sequence[Arrays]) -> list[dict[str, jax.Array]]:
    state, results = optimizer.init(params), []
    for scale, direction in zip(_SCALES, directions, strict=True):
        grads: Any = {name: scale * value for name, value in direction.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            result, state = optimizer.update(grads, state, params)
        results.append({name: result[name] for name in params})  # type: ignore[index,call-overload]
    return results


def _links(optimizer: GradientTransformation) -> Iterator[GradientTransformation]:
    """The transformations that a chain consists of, or the one that it is."""
    held, first = (inspect.getclosurevars(f).nonlocals for f in (optimizer.update, optimizer.init))
    if isinstance(inner := held.get("tx"), GradientTransformation):
        yield from _links(inner)
    elif "update_fns" in held and "init_fns" in first:
        for init, update in zip(first["init_fns"], held["update_fns"], strict=True):
            yield from _links(GradientTransformation(init, update))
    else:
        yield optimizer


def _name(optimizer: GradientTransformation) -> str:
    """What the transformation was made by: optax's functions return closures named after them."""
    inner = inspect.getclosurevars(optimizer.update).nonlocals.get("tx")
    if isinstance(inner, GradientTransformation):
        return _name(inner)
    return str(optimizer.update.__qualname__).split(".")[0]
