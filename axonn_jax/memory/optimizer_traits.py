"""Traits of an optimizer, found by trial: elementwise, one parameter at a time, and the owners of its state."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, tree_map_with_path
from optax import GradientTransformation, GradientTransformationExtraArgs, with_extra_args_support

from axonn_jax.errors import UserError

_SHAPES = {2: (256, 130), 1: (256,)}
"""Shapes of probes by number of dims: large ones, as adafactor is elementwise on small ones."""
_SCALES = (1e-3, 1e3)
"""Scales of a probe's gradients, each used until an update is seen: Adam's first one does not depend on the scale."""
_LONGEST = 256
"""Steps within which an update must show; those of a warm-up or of a running average begin with zeros."""
_ROUNDING = 1e-4
"""Largest difference between two computations of an update that is rounding, over the update's largest entry."""

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
        raise UserError("optimizer", type(optimizer).__name__, _DRIVEN)


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

    Found out by trying: tiny arrays under all names, all at once and the own ones alone.
    """
    own = set(own)
    if len(own) == len(params):
        return
    tiny = {name: jnp.full((2,) * len(p.shape), 0.5, jnp.float32) for name, p in params.items()}
    grads = {name: (1 + i % 7) * value for i, (name, value) in enumerate(tiny.items())}
    parts = [{name: tree[name] for name in own} for tree in (tiny, grads)]
    probe = _Trial(optimizer)
    together = probe.updates(tiny, [grads] * len(_SCALES))
    if not _close(together, probe.updates(parts[0], [parts[1]] * len(_SCALES)), own):
        raise UserError(
            "optimizer", "a transformation that looks at all parameters together",
            "one that treats every parameter by itself where grid.pipe is above 1, since no stage has them "
            "all; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip


def check_offload(optimizer: GradientTransformation, where: str, params: Arrays) -> bool:
    """Return True if every element is updated by itself; if not, every parameter must be.

    Found out by trying: a parameter of each kind that it treats alike, by itself and in two parts. Raises ``UserError``
    naming the transformation that looks at all parameters together, or updates nothing; `where` names the option that
    needs it.
    """
    if _splits(optimizer, _elements, shapes := _probed(optimizer, params)):
        return True
    if not _splits(optimizer, _parameters, shapes):
        faulty = [_name(link) for link in _links(optimizer) if _looks_at_all(link, shapes)]
        raise UserError(
            "optimizer", ", ".join(faulty) or _name(optimizer),
            f"a transformation that treats every parameter by itself with {where}, which has a bucket of them at a "
            "time; for clipping by the global norm use `clip` (train.clip)",
        )  # fmt: skip
    return False


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


def _elements(params: Arrays) -> list[Arrays]:
    return [{name: value[rows] for name, value in params.items()} for rows in (slice(0, 128), slice(128, 256))]


def _parameters(params: Arrays) -> list[Arrays]:
    return [{name: value} for name, value in params.items()]


def _looks_at_all(link: GradientTransformation, shapes: Shapes) -> bool:
    try:
        return not _splits(link, _parameters, shapes)
    except UserError:  # a link that only scales by zero for long, say
        return False


def _probed(optimizer: GradientTransformation, params: Arrays) -> Shapes:
    """Return a probe of each kind of parameter that an optimizer treats in a way of its own and does not freeze."""
    small: Any = {name: jax.ShapeDtypeStruct((2,) * len(p.shape), jnp.float32) for name, p in params.items() if p.shape}
    try:
        kinds = treatments(optimizer, small)
    except UserError:  # masks of all parameters' names
        kinds = {}
    moved = _moved(optimizer, {name: small[name].shape for name in {k: n for n, k in kinds.items()}.values()})
    probes = tuple((name, _SHAPES[min(len(small[name].shape), 2)]) for name in moved)
    return probes or (("matrix", _SHAPES[2]), ("vector", _SHAPES[1]))  # where it takes no parameter alone


def _moved(optimizer: GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters that gradients of ones move; none where the optimizer does not take such names."""
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    try:
        (update,) = _Trial(optimizer).updates(params, [params])
    except UserError:
        return []
    return [name for name, value in update.items() if np.any(np.asarray(value) != 0)]


@lru_cache(maxsize=32)
def _splits(optimizer: GradientTransformation, divide: Callable[[Arrays], list[Arrays]], shapes: Shapes) -> bool:
    """Return True if parts of parameters get the same updates as within the whole."""
    rng = np.random.default_rng(0)
    drawn = [{name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes} for _ in range(3)]
    probe = _Trial(optimizer)
    want = probe.updates(drawn[0], drawn[1:])
    in_parts: list[dict[str, Any]] = [{} for _ in want]
    for params, *grads in zip(*map(divide, drawn), strict=True):
        for joined, part in zip(in_parts, probe.updates(params, grads), strict=True):
            for name, value in part.items():
                joined[name] = np.concatenate([joined[name], value]) if name in joined else np.asarray(value)
    return _close(want, in_parts, dict(shapes))


def _close(want: Sequence[Arrays], have: Sequence[Arrays], names: Iterable[str]) -> bool:
    """Return True if updates by name are equal but for rounding, relative to each update's largest entry."""

    def differ(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
        return bool(np.abs(a - b).max(initial=0.0) > _ROUNDING * np.abs(a).max(initial=0.0))

    pairs = [(np.asarray(a[name]), np.asarray(b[name])) for name in names for a, b in zip(want, have, strict=True)]
    return not any(differ(a, b) for a, b in pairs)


class _Trial:
    """Trial of an optimizer on probes: updates at two scales of gradients, each the first that is not all zero."""

    def __init__(self, optimizer: GradientTransformation):
        self._optimizer = optimizer
        self._steps: list[int] = []
        """Steps of the first probes at each scale; later ones take as many."""
        self._step = jax.jit(self._stepped)

    def _stepped(self, state: Any, params: Any, grads: Any) -> tuple[Any, Any]:
        return updated(self._optimizer, grads, state, params, jnp.float32(1.0))

    def updates(self, params: Arrays, directions: Sequence[Arrays]) -> list[dict[str, jax.Array]]:
        """The updates of `params` by gradients along each of the directions, at a scale of its own.

        Raises ``UserError`` where all of them are zero for too long.
        """
        given: Any = dict(params)
        try:
            return self._updates(given, directions)
        except UserError:
            raise
        except _OF_MASKS as error:
            raise UserError("optimizer", "a transformation that does not take some parameters alone", _MASKS) from error

    def _updates(self, given: Any, directions: Sequence[Arrays]) -> list[dict[str, jax.Array]]:
        state, results, known = self._optimizer.init(given), [], list(self._steps)
        for number, (scale, direction) in enumerate(zip(_SCALES, directions, strict=False)):
            grads: Any = {name: scale * value for name, value in direction.items()}
            for step in range(1, _LONGEST + 1):
                result, state = self._step(state, given, grads)
                if step == known[number] if known else any(np.any(np.asarray(u) != 0) for u in result.values()):
                    break
            else:
                accepted = f"one that changes a weight in its first {_LONGEST} steps, so that what it does can be tried"
                raise UserError("optimizer", _name(self._optimizer), accepted)
            if not known:
                self._steps.append(step)
            results.append({name: result[name] for name in given})
        return results


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

    def replaced(path: Any, leaf: Any) -> Any:
        if len(path) < 2 or getattr(path[-2], "name", None) != "hyperparams":
            return leaf
        kept.add(name := path[-1].key)
        return jax.device_put(np.asarray(numbers.get(name, leaf), leaf.dtype), leaf.sharding)

    state = tree_map_with_path(replaced, state)
    for name in numbers.keys() - kept:
        raise UserError("set", name, ", ".join(sorted(kept)) or "none; optax.inject_hyperparams keeps them")
    return state
