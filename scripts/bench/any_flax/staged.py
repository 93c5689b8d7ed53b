"""One model in a pipeline beside a plain loop over the same microbatches, on one grid after another."""

import contextlib
import io
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from any_flax.compare import Parity, moved, worst
from any_flax.strangers import Model
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.grid import Grid, GridShape
from axonn_jax.core.tensor.specs import is_replicated, values_of

STEPS, MICROBATCHES, RATE = 6, 4, 0.05


@dataclass(frozen=True)
class Outcome(Parity):
    """One model on one grid; a gradient is a parameter's change over all steps, over the learning rate."""

    share: float
    """Bytes of parameters a device over its stage's bytes by `z * y * x`, of the stage with the largest ratio."""
    whole: tuple[str, ...]
    """Parameters of more than 1 % of their stage's bytes that each of its devices holds whole."""
    lines: tuple[str, ...]
    """What the trainer says of stages and rows."""


@dataclass(frozen=True)
class Plain:
    """The model on one device."""

    losses: Sequence[float]
    gradients: Mapping[str, np.ndarray]
    """Changes of the parameters over all steps, over the learning rate."""
    rounding: float
    """Worst difference of a change, with parameters and inputs moved by a unit in the last place."""
    loss_rounding: float
    """Worst difference of a loss, likewise, relative."""


def batches(model: Model) -> list[Any]:
    """Batches of all steps: the rows of the model's batch in another order each; leaves without rows are marked."""
    rows = jax.tree.leaves(model.batch)[0].shape[0]

    def batch(order: np.ndarray) -> Any:
        return jax.tree.map(lambda leaf: leaf[order] if len(leaf) == rows else ax.replicated(leaf), model.batch)

    return [batch(np.random.default_rng(step).permutation(rows)) for step in range(STEPS)]


def run_plain(model: Model, linen: bool) -> Plain:
    """A loop over microbatches that adds up their gradients, and how much rounding alone moves it."""
    losses, changes = _loop(model, linen, lambda tree: tree)
    rng = np.random.default_rng(0)
    others, again = _loop(model, linen, lambda tree: moved(tree, rng))
    return Plain(losses, changes, worst(changes, again)[0], _distance(losses, others))


def compare(
    model: Model, linen: bool, shape: GridShape, plain: Plain, channel: str = "", grid: Grid | None = None
) -> Outcome:
    """One grid's outcome; of several processes, which bring a grid and a channel, the worst.

    Runs of 2 or 3 devices in one process go on with the other number of stages half way, from a checkpoint.
    """
    start, train = _by_name(model.make(), linen), batches(model)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer = _trainer(model, grid or ax.init(**asdict(shape)), channel)
        losses = [float(trainer.step(batch)["loss"]) for batch in train[: STEPS // 2]]
        with tempfile.TemporaryDirectory() as folder:
            if shape.devices == shape.pipe and not channel:
                trainer.save(folder, len(losses))
                trainer.close()
                trainer = _trainer(model, ax.init(pipe=5 - shape.pipe))
                trainer.resume(folder)
            losses += [float(trainer.step(batch)["loss"]) for batch in train[STEPS // 2 :]]
    params = trainer.engine.params
    difference, where = worst(
        {name: plain.gradients[name] for name in params},
        _changes({name: start[name] for name in params}, {name: np.asarray(p) for name, p in params.items()}),
    )
    share, whole = _share(params, shape.z * shape.y * shape.x)
    trainer.close()
    if channel:
        from mpi4py import MPI

        difference, where = max(MPI.COMM_WORLD.allgather((difference, where)))
    lines = tuple(line for line in said.getvalue().splitlines() if line.startswith(("stage ", "rows: ", "a scan")))
    return Outcome(_distance(plain.losses, losses), difference, where, share, whole, lines)


def _trainer(model: Model, grid: Grid, channel: str = "") -> Any:
    pipeline = ax.PipelineConfig(channel=channel or "auto")  # type: ignore[arg-type]
    options = {"microbatches": MICROBATCHES, "clip": 0.0, "pipeline": pipeline}
    # An optimizer without state: the change of a parameter is the sum of its gradients.
    return ax.Trainer(model.make(), optax.sgd(RATE), grid, loss=model.loss, **options)  # type: ignore[arg-type]


def _loop(model: Model, linen: bool, move: Callable[[Any], Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    made = model.make()
    graph, params, state = (None, made, {}) if linen else nnx.split(made, nnx.Param, ...)  # type: ignore[misc]

    def loss(params: Any, state: Any, batch: Any) -> Any:
        if linen:
            return model.loss(params, batch), state
        module = nnx.merge(graph, params, state, copy=True)  # type: ignore[arg-type]
        return model.loss(module, batch), nnx.split(module, nnx.Param, ...)[2]  # type: ignore[misc]

    program = jax.jit(jax.value_and_grad(loss, has_aux=True))
    params = start = move(params)
    losses = []
    for batch in batches(model):
        total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
        for number in range(MICROBATCHES):
            (value, state), found = program(params, state, move(_part(batch, number)))
            total += float(value) / MICROBATCHES
            sums = jax.tree.map(lambda a, b: a + b / MICROBATCHES, sums, found)
        losses.append(total)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, sums)
    return losses, _changes(*(_names(each, linen) for each in (start, params)))


def _part(batch: Any, number: int) -> Any:
    def part(leaf: Any) -> Any:
        rows = 0 if is_replicated(leaf) else len(leaf) // MICROBATCHES
        return leaf if is_replicated(leaf) else leaf[number * rows : (number + 1) * rows]

    return values_of(jax.tree.map(part, batch, is_leaf=is_replicated))


def _by_name(made: Any, linen: bool) -> dict[str, np.ndarray]:
    return _names(made if linen else nnx.state(made, nnx.Param), linen)


def _names(params: Any, linen: bool) -> dict[str, np.ndarray]:
    if not linen:
        return {".".join(map(str, path)): np.asarray(var.get_value()) for path, var in nnx.to_flat_state(params)}
    leaves, _ = jax.tree.flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def _changes(start: Mapping[str, np.ndarray], end: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: (end[name].astype(np.float64) - value.astype(np.float64)) / RATE for name, value in start.items()}


def _distance(losses: Sequence[float], others: Sequence[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(losses, others, strict=True))


def _share(params: Mapping[str, jax.Array], devices: int) -> tuple[float, tuple[str, ...]]:
    """The largest ratio of a stage, and what its devices hold whole."""
    stages: dict[Any, dict[str, tuple[int, int]]] = defaultdict(dict)
    for name, value in params.items():
        part = int(np.prod(value.sharding.shard_shape(value.shape)))
        stages[frozenset(value.sharding.device_set)][name] = part, int(value.size)
    ratios, whole = [], []
    for sizes in stages.values():
        total = sum(size for _, size in sizes.values())
        ratios.append(sum(part for part, _ in sizes.values()) * devices / total)
        whole += [name for name, (part, size) in sizes.items() if part == size > total / 100 and devices > 1]
    return max(ratios), tuple(whole)
