"""One model beside itself: parallelized against plain, on one grid after another."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from any_flax.strangers import Model
from flax import nnx
from hlo.collectives import Collective, collectives
from hlo.steps import keep_recomputation, mesh_sizes, text_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import axonn_jax as ax
from axonn_jax.core.grid import BATCH_AXES, Grid, GridShape, build_grid

_COMBINER = "cpu-all-reduce-combiner"
"""XLA's pass that makes one collective of several; without, each says where it comes from."""
_REGION = "/shard_map"
"""Part of a collective's origin if it is in a layer's region, or at its border."""


@dataclass(frozen=True)
class Traffic:
    """Bytes a device sends in loss and gradients, on a ring."""

    reported: int | None
    """By `sharding_report`; None on one device."""
    layers: float
    """Compiled collectives of the layers."""
    added: Mapping[str, float]
    """Compiled collectives of the partitioner between the layers, by operation and kind."""


@dataclass(frozen=True)
class Parity:
    """Differences of one model on one grid from the model on one device."""

    loss: float
    """Worst difference of a loss, relative."""
    gradient: float
    """Worst difference of an element over the parameter's largest, or over 1/1,000 of the largest of all."""
    where: str
    """Parameter with the worst gradient."""


@dataclass(frozen=True)
class Outcome(Parity):
    """One model on one grid."""

    share: float
    """Bytes of parameters a device over the ideal, a part in `z * y * x`."""
    traffic: Traffic
    whole: tuple[str, ...]
    """Parameters of more than 1 % of all bytes that every device holds whole."""


@dataclass(frozen=True)
class _Split:
    """Parameters by path, and a loss of them."""

    params: Mapping[str, Any]
    loss: Callable[[Mapping[str, Any], Any], Any]
    reported: int | None = None


@dataclass(frozen=True)
class Plain:
    """The model on one device."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    rounding: float
    """Worst difference of a gradient, as in `Outcome`, with parameters and inputs moved by a unit in the last place."""


def run_plain(model: Model, linen: bool) -> Plain:
    """Loss and every gradient on one device, and how much rounding alone moves them."""
    split = _linen_split(model.make(), model.loss) if linen else _module_split(model.make(), model.loss)
    program = jax.jit(jax.value_and_grad(split.loss))
    loss, found = program(split.params, model.batch)
    _, again = program(*moved((split.params, model.batch), np.random.default_rng(0)))
    gradients = _float64(found)
    return Plain(float(loss), gradients, worst(gradients, _float64(again))[0])


def moved(tree: Any, rng: np.random.Generator) -> Any:
    """The arrays, each number of floating point moved by a unit in the last place."""

    def move(value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        towards = np.where(rng.integers(0, 2, value.shape), np.inf, -np.inf).astype(value.dtype)
        return np.nextafter(np.asarray(value), towards)

    return jax.tree.map(move, tree)


def _float64(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(jax.device_get(value), np.float64) for name, value in values.items()}


def compare(model: Model, linen: bool, shape: GridShape, plain: Plain) -> Outcome:
    """One grid's outcome."""
    grid = build_grid(shape, jax.devices()[: shape.devices])
    if linen:
        loss_on_grid, params = ax.parallelize_linen(model.loss, model.make(), grid, model.batch)
        split = _linen_split(params, loss_on_grid, sum(ax.sharding_report(loss_on_grid).traffic.values()))
    else:
        forward = model.forward
        assert forward is not None
        parallel = ax.parallelize(model.make(), grid, call=lambda module: forward(module, model.batch))
        split = _module_split(parallel, model.loss, sum(ax.sharding_report(parallel).traffic.values()))
    program = jax.jit(jax.value_and_grad(split.loss))
    lowered = program.lower(split.params, _laid_out(model.batch, grid))
    options = keep_recomputation()
    options["xla_disable_hlo_passes"] += f",{_COMBINER}"
    compiled = lowered.compile(options)
    value, found = compiled(split.params, _laid_out(model.batch, grid))
    difference, where = worst(plain.gradients, _float64(found))
    held = {
        name: int(np.prod(one.sharding.shard_shape(one.shape))) * one.dtype.itemsize
        for name, one in split.params.items()
    }
    total = {name: one.size * one.dtype.itemsize for name, one in split.params.items()}
    size = sum(total.values())
    ideal = size / (shape.z * shape.y * shape.x)
    whole = tuple(name for name in total if held[name] == total[name] > size / 100)
    traffic = _traffic(collectives(text_of(compiled), mesh_sizes(shape)), split.reported)
    return Outcome(
        abs(float(value) - plain.loss) / abs(plain.loss), difference, where, sum(held.values()) / ideal, traffic, whole
    )


def _module_split(module: Any, loss: Callable[[Any, Any], Any], reported: int | None = None) -> _Split:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    flat = {".".join(map(str, path)): (path, variable) for path, variable in nnx.to_flat_state(params)}

    def of(values: Mapping[str, Any], batch: Any) -> Any:
        state = nnx.from_flat_state([(path, var.replace(values[name])) for name, (path, var) in flat.items()])
        return loss(nnx.merge(graph, state, rest, copy=True), batch)

    return _Split({name: variable.get_value() for name, (_, variable) in flat.items()}, of, reported)


def _linen_split(params: Any, loss: Callable[[Any, Any], Any], reported: int | None = None) -> _Split:
    leaves, tree = jax.tree.flatten_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]

    def of(values: Mapping[str, Any], batch: Any) -> Any:
        return loss(jax.tree.unflatten(tree, [values[name] for name in names]), batch)

    return _Split(dict(zip(names, (leaf for _, leaf in leaves), strict=True)), of, reported)


def _laid_out(batch: Any, grid: Grid) -> Any:
    """The batch on the grid: rows over `data` and `z`, leaves with another number of rows on every device."""
    rows = jax.tree.leaves(batch)[0].shape[0]

    def place(leaf: Any) -> Any:
        spec = P(BATCH_AXES) if leaf.ndim and leaf.shape[0] == rows else P()
        return jax.device_put(leaf, NamedSharding(grid.mesh, spec))

    return jax.tree.map(place, batch)


def worst(plain: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """Worst difference of an element, as in `Outcome`, and its parameter."""
    top = max(float(np.abs(value).max()) for value in plain.values())
    errors = {
        name: float(np.abs(value - other[name]).max() / max(float(np.abs(value).max()), 1e-3 * top))
        for name, value in plain.items()
    }
    where = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else np.inf)
    return errors[where], where


def _traffic(found: Sequence[Collective], reported: int | None) -> Traffic:
    layers, added = 0.0, Counter[str]()
    for one in found:
        border = one.op_name.endswith(_REGION)  # where a layer's parameters are gathered; the rest is the partitioner's
        if f"{_REGION}/" in one.op_name or (border and one.kind == "all-gather"):
            layers += float(one.bytes)
        else:
            added[f"{one.op_name.rpartition('/')[2]} {one.kind} {one.over}"] += float(one.bytes)
    return Traffic(reported, layers, dict(added.most_common()))
