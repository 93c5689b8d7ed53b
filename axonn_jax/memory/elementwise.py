"""Finds out what an optimizer does with parameters: with each element by itself, and with which of them the same."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from axonn_jax.errors import UserError

_SHAPES = {"matrix": (256, 130), "vector": (256,)}  # adafactor, for one, is elementwise on smaller ones
_SCALES = (1e-3, 1e3)
_PARTS = (slice(0, 128), slice(128, 256))


def check_elementwise(optimizer: optax.GradientTransformation, where: str) -> None:
    """Raises ``UserError``, with the name of what is at fault, unless every element is updated by itself.

    Found out by trying: a matrix and a vector, whole and in two parts, with gradients small and then large. `where`
    says what needs it.
    """
    if _is_elementwise(optimizer):
        return
    faulty = [_name(part) for part in _links(optimizer) if not _is_elementwise(part)]
    raise UserError(
        "optimizer", ", ".join(faulty) or _name(optimizer), f"an elementwise transformation with {where} (adam, adamw, "
        "lion, sgd, chains of such), which sees parts of parameters; for clipping by the global norm use `clip` "
        "(train.clip)",
    )  # fmt: skip


def treatments(optimizer: optax.GradientTransformation, params: Mapping[str, Any]) -> dict[str, int]:
    """Numbers by parameter, the same where the optimizer does the same with them whatever their names."""
    known: list[tuple[str, list[Any]]] = []
    numbers = {}
    for name, p in params.items():
        traced = traced_update(optimizer, {name: p})
        number = next((at for at, other in enumerate(known) if same_update(traced, other)), len(known))
        if number == len(known):
            known.append(traced)
        numbers[name] = number
    return numbers


def traced_update(optimizer: optax.GradientTransformation, params: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """What an optimizer computes for such parameters at a step, as text and constants."""
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}

    def step(params: Any, grads: Any) -> Any:
        return optimizer.update(grads, optimizer.init(params), params)

    with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
        closed = jax.make_jaxpr(step)(shapes, shapes)
    return str(closed.jaxpr), closed.consts


def same_update(one: tuple[str, list[Any]], other: tuple[str, list[Any]]) -> bool:
    """Whether two traces are of the same computation."""
    same = one[0] == other[0] and len(one[1]) == len(other[1])
    return same and all(np.array_equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def _is_elementwise(optimizer: optax.GradientTransformation) -> bool:
    rng = np.random.default_rng(0)
    drawn = [{name: rng.normal(size=shape).astype(np.float32) for name, shape in _SHAPES.items()} for _ in range(3)]

    def run(rows: slice) -> list[dict[str, jax.Array]]:
        params, *grads = ({name: value[rows] for name, value in one.items()} for one in drawn)
        return jax.jit(partial(_updates, optimizer))(params, grads)  # type: ignore[no-any-return]

    whole, *parts = (run(rows) for rows in (slice(None), *_PARTS))
    pairs = (
        (both[name], np.concatenate([one[number][name] for one in parts]))
        for number, both in enumerate(whole)
        for name in both
    )
    return all(np.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in pairs)


def _updates(
    optimizer: optax.GradientTransformation, params: dict[str, jax.Array], directions: list[dict[str, jax.Array]]
) -> list[dict[str, jax.Array]]:
    state, results = optimizer.init(params), []
    for scale, direction in zip(_SCALES, directions, strict=True):  # Adam's first update does not depend on the scale
        grads = {name: scale * value for name, value in direction.items()}
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            result, state = optimizer.update(grads, state, params)
        results.append({name: result[name] for name in params})  # type: ignore[index,call-overload]
    return results


def _links(optimizer: optax.GradientTransformation) -> Iterator[optax.GradientTransformation]:
    """The transformations that a chain consists of, or the one that it is."""
    held, first = (inspect.getclosurevars(f).nonlocals for f in (optimizer.update, optimizer.init))
    if "update_fns" in held and "init_fns" in first:
        for init, update in zip(first["init_fns"], held["update_fns"], strict=True):
            yield from _links(optax.GradientTransformation(init, update))
    else:
        yield optimizer


def _name(optimizer: optax.GradientTransformation) -> str:
    """What the transformation was made by: optax's functions return closures named after them."""
    inner = inspect.getclosurevars(optimizer.update).nonlocals.get("tx")
    if isinstance(inner, optax.GradientTransformation):
        return _name(inner)
    return getattr(optimizer.update, "__qualname__", "custom").split(".")[0]
