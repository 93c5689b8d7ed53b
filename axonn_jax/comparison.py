"""One model on one mesh, twice: the package's explicit program beside automatic partitioning."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from axonn_jax.grid import MESH_AXES, GridShape, build_grid
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.communication import Work, predict
from axonn_jax.planner.compiled import collectives
from axonn_jax.planner.ring import Totals, totals
from axonn_jax.planner.sliced import totals_if_scattered

if TYPE_CHECKING:
    import jax

    from axonn_jax.tensor.params import Parts
    from axonn_jax.train.automatic import Constraints
    from axonn_jax.train.step import Step, TrainState

LOSS_TOLERANCE = 1e-5
"""Relative: both losses are float32 means of the same numbers, added in another order."""
GRADIENT_TOLERANCE = 1e-4
"""Of a parameter's gradient, relative to its norm: float32 sums over tokens in another order."""


@dataclass(frozen=True)
class Comparison:
    """What a device sends in a step under either program, by kind and axes, and how long a step takes."""

    shape: ModelShape
    grid: GridShape
    sequences: int
    explicit: Totals
    """The package's program."""
    automatic: Totals
    """Automatic partitioning, as XLA's CPU backend compiled it."""
    scattered: Totals
    """The same with every all-reduce that is only sliced as a reduce-scatter, which other backends make of it."""
    step_s: tuple[float, float] | None = None
    """Median seconds of a step, explicit and automatic; None where nothing ran."""
    rounds_s: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Every measured step."""

    @property
    def ratio(self) -> float:
        """Bytes of the explicit program over those of automatic partitioning as compiled; 1 where none are sent."""
        return _over(self.explicit, self.automatic)

    @property
    def ratio_scattered(self) -> float:
        """As `ratio`, over automatic partitioning at its best."""
        return _over(self.explicit, self.scattered)

    @property
    def least(self) -> float:
        """Bytes of the better program."""
        return float(min(map(_sum, (self.explicit, self.automatic))))

    def reason(self) -> str:
        """Where the explicit program sends more than automatic partitioning at its best, and which layers do."""
        more = {axes: _sum(self.explicit, axes) - _sum(self.scattered, axes) for _, axes in self.explicit if axes}
        axes = max(more, key=lambda one: more[one], default="")
        if not axes or more[axes] <= 0:
            return ""
        work = Work(self.shape, self.grid, self.sequences)
        layers: dict[str, Fraction] = {}
        for one in predict(work):
            if one.over == axes:
                name = f"{one.phase} {one.kind} of {one.name}"
                layers[name] = layers.get(name, Fraction(0)) + one.bytes
        top = sorted(layers, key=lambda name: -layers[name])[:2]
        megabytes = float(more[axes]) / 1e6
        return f"over {axes} {megabytes:+.3g} MB; largest there: {', '.join(top)}"


def _sum(sums: Totals, axes: str | None = None) -> Fraction:
    return sum((amount for (_, over), amount in sums.items() if axes in (None, over)), Fraction(0))


def _over(mine: Totals, theirs: Totals) -> float:
    a, b = _sum(mine), _sum(theirs)
    return 1.0 if a == b else float(a / b) if b else float("inf")


def compare_compiled(
    shape: ModelShape, grid: GridShape, sequences: int, constraints: "Constraints" = "layers"
) -> Comparison:
    """Compares the bytes of a model of any depth on a grid of virtual devices; compiles one and two blocks.

    Blocks are alike: the second one's bytes count for every further one. The explicit program's bytes at full depth
    are the predicted ones, which are compared with the compiled ones at two blocks. Raises ``UserError`` where model
    or batch do not divide over the grid, ``RuntimeError`` where prediction and program differ.
    """
    one, two = (_compiled(replace(shape, layers=layers), grid, sequences, constraints) for layers in (1, 2))
    for found in (one, two):
        if found.explicit != totals(predict(Work(found.shape, grid, sequences))):
            raise RuntimeError(f"the explicit program on {grid} does not communicate what is predicted")
    explicit = totals(predict(Work(shape, grid, sequences)))
    automatic, scattered = (
        _extended(getattr(one, side), getattr(two, side), shape.layers) for side in ("automatic", "scattered")
    )
    return Comparison(shape, grid, sequences, explicit, automatic, scattered)


def _extended(one: Totals, two: Totals, layers: int) -> Totals:
    none = Fraction(0)
    return {
        key: one.get(key, none) + (layers - 1) * (two.get(key, none) - one.get(key, none)) for key in {**one, **two}
    }


def _compiled(shape: ModelShape, grid: GridShape, sequences: int, constraints: "Constraints") -> Comparison:
    from flax import nnx

    from axonn_jax.models.transformer import Transformer
    from axonn_jax.tensor.params import take_apart

    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), attention="xla"))
    steps = _steps(take_apart(model), shape, grid, constraints)
    programs = [step.compiled((1, sequences, shape.seq_len + 1)) for step in steps]
    return _counted(programs, shape, grid, sequences)


def _steps(parts: "Parts", shape: ModelShape, grid: GridShape, constraints: "Constraints") -> "tuple[Step, Step]":
    """The explicit step and the automatic one, with AdamW and clipping."""
    import jax
    import jax.numpy as jnp
    import optax

    from axonn_jax.train.automatic import AutomaticProgram
    from axonn_jax.train.program import StageProgram
    from axonn_jax.train.step import Step

    laid = build_grid(grid, jax.devices()[: grid.devices])
    explicit = StageProgram(parts, laid, jnp.dtype("float32"))
    automatic = AutomaticProgram(parts, laid, jnp.dtype("float32"), constraints)
    return Step(explicit, optax.adamw(1e-3), 1.0), Step(automatic, optax.adamw(1e-3), 1.0)


def _counted(
    programs: "Sequence[jax.stages.Compiled]", shape: ModelShape, grid: GridShape, sequences: int
) -> Comparison:
    sizes = {axis: int(getattr(grid, axis)) for axis in MESH_AXES}
    explicit, automatic = (str(program.as_text()) for program in programs)
    found = collectives(automatic, sizes)
    return Comparison(
        shape,
        grid,
        sequences,
        totals(collectives(explicit, sizes)),
        totals(found),
        totals_if_scattered(automatic, found),
    )


def compare_runs(
    shape: ModelShape, grid: GridShape, sequences: int, constraints: "Constraints" = "layers", rounds: int = 7
) -> Comparison:
    """Compares bytes and seconds of real steps on this process's devices, the two programs in turns.

    Both start from the same weights and see the same tokens. Raises ``UserError`` where model, batch and devices do
    not fit, ``RuntimeError`` where the two do not compute the same loss and gradients.
    """
    import jax
    import numpy as np
    from flax import nnx

    from axonn_jax.models.transformer import Transformer
    from axonn_jax.tensor.params import take_apart

    grid.check_model(shape)
    grid.check_batch(sequences, 1)
    laid = build_grid(grid, jax.devices()[: grid.devices])
    with jax.set_mesh(laid.mesh):
        parts = take_apart(Transformer(shape, rngs=nnx.Rngs(0), attention="xla"))
    steps = _steps(parts, shape, grid, constraints)
    rows = (1, sequences, shape.seq_len + 1)
    programs = [step.compiled(rows) for step in steps]
    tokens = np.random.default_rng(0).integers(0, shape.vocab, rows, dtype=np.int32)
    batch = jax.device_put(tokens, steps[0].program.batch_sharding())
    states = [_start(step) for step in steps]
    metrics: list[Any] = [None, None]

    def run(which: int) -> float:
        begin = time.perf_counter()
        state, metrics[which] = programs[which](states[which], batch, None)
        states[which] = jax.block_until_ready(state)
        return time.perf_counter() - begin

    run(0), run(1)
    _check_same(states, metrics)
    times = [(run(0), run(1)) for _ in range(rounds)]
    counted = _counted(programs, shape, grid, sequences)
    if not times:
        return counted
    explicit, automatic = zip(*times, strict=True)
    medians = statistics.median(explicit), statistics.median(automatic)
    return replace(counted, step_s=medians, rounds_s=(explicit, automatic))


def _start(step: "Step") -> "TrainState":
    """Weights of its own, since a step's are donated to it, and the optimizer's first state."""
    import jax
    import jax.numpy as jnp

    from axonn_jax.train.step import TrainState

    params = jax.tree.map(jnp.copy, step.program.parts.params)
    return TrainState(step.update.start(jax.device_put(params, step.program.shardings())), step.first_scale())


def _check_same(states: Sequence[Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """After one step: equal losses, and equal first moments, which are then a tenth of the (clipped) gradients."""
    import numpy as np
    import optax

    losses = [float(one["loss"]) for one in metrics]
    if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[1]):
        raise RuntimeError(f"the programs' losses differ: {losses[0]} and {losses[1]}")
    mine, theirs = (optax.tree_utils.tree_get(state.model.optimizer, "mu") for state in states)
    for name in theirs:
        a, b = np.asarray(mine[name], np.float64), np.asarray(theirs[name], np.float64)
        if not np.linalg.norm(a - b) <= GRADIENT_TOLERANCE * np.linalg.norm(b):
            raise RuntimeError(f"the programs' gradients of {name} differ by {np.linalg.norm(a - b)}")
