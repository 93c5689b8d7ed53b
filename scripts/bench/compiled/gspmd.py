"""One model on one mesh, twice: the package's explicit program beside automatic partitioning."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from compiled.common import Constraints, temporary_bytes
from hlo.collectives import Totals, collectives, totals
from hlo.scatterable import totals_if_scattered
from hlo.steps import keep_recomputation, mesh_sizes, text_of
from racer import in_turns

from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.core.options import Activations, ReshardAfter, ResidualComm
from axonn_jax.planning.communication import StepSpec, predict
from axonn_jax.planning.declared.residual_comm import choose_residual_comm

if TYPE_CHECKING:
    import jax

    from axonn_jax.core.engines.step import TrainState, TrainStep
    from axonn_jax.core.tensor.params import SplitModule

LOSS_TOLERANCE = 1e-5
"""Relative: both losses are float32 means of the same numbers, added in another order."""
GRADIENT_TOLERANCE = 1e-4
"""Of a parameter's gradient, relative to its norm: float32 sums over tokens in another order."""


@dataclass(frozen=True)
class Way:
    """How steps are run; microbatches and activations are those of both programs."""

    microbatches: int = 1
    activations: Activations = "none"
    reshard_after: ReshardAfter = "forward"
    """How long the explicit program keeps gathered weights; the other's are XLA's business."""
    constraints: Constraints = "layers"
    residual_comm: ResidualComm = "all_reduce"
    """What splits the features inside the explicit program's blocks; the other's are split over `y`."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """How tokens reach their experts in the explicit program; in the other by einsums with one-hot masks."""

    def work(self, shape: ModelShape, grid: GridShape, sequences: int) -> StepSpec:
        """Such a step of a model."""
        comm = choose_residual_comm(self.residual_comm, shape, grid, self.activations)
        policy = StepPolicy(self.microbatches, self.activations, self.reshard_after)
        return StepSpec(shape, grid, sequences, policy, comm=comm, moe=self.moe)


@dataclass(frozen=True)
class Comparison:
    """What a device sends in a step under either program, by kind and axes, and how long a step takes."""

    work: StepSpec
    explicit: Totals
    """The package's program."""
    automatic: Totals
    """Automatic partitioning, as XLA's CPU backend compiled it."""
    scattered: Totals
    """The same with every all-reduce that is only sliced as a reduce-scatter, which other backends make of it."""
    temporary: tuple[float, float]
    """Bytes of a device beside state and batch, explicit and automatic, as XLA's CPU backend says."""
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
        """As `ratio`, over automatic partitioning with reduce-scatters."""
        return _over(self.explicit, self.scattered)

    @property
    def moved(self) -> Totals:
        """As `scattered`, with sums over `data` and `z` counted once a step: moved out of the microbatches' loop.

        A bound in favour of automatic partitioning: what a compiler would reach that moves all of them.
        """

        def once(kind: str, axes: str) -> bool:
            return kind in ("all-reduce", "reduce-scatter") and not {"data", "z"}.isdisjoint(axes.split("*"))

        count = self.work.policy.microbatches
        return {key: amount / count if once(*key) else amount for key, amount in self.scattered.items()}

    @property
    def ratio_moved(self) -> float:
        """As `ratio`, over automatic partitioning at its very best."""
        return _over(self.explicit, self.moved)

    def reason(self) -> str:
        """Where the explicit program sends more than automatic partitioning at its best, and which layers do."""
        more = {axes: _sum(self.explicit, axes) - _sum(self.moved, axes) for _, axes in self.explicit if axes}
        axes = max(more, key=lambda over: more[over], default="")
        if not axes or more[axes] <= 0:
            return ""
        layers: dict[str, Fraction] = {}
        for collective in predict(self.work):
            if collective.over == axes:
                name = f"{collective.phase} {collective.kind} of {collective.name}"
                layers[name] = layers.get(name, Fraction(0)) + collective.bytes
        top = sorted(layers, key=lambda name: -layers[name])[:2]
        megabytes = float(more[axes]) / 1e6
        return f"over {axes} {megabytes:+.3g} MB; largest there: {', '.join(top)}"


def _sum(sums: Totals, axes: str | None = None) -> Fraction:
    return sum((amount for (_, over), amount in sums.items() if axes in (None, over)), Fraction(0))


def _over(mine: Totals, theirs: Totals) -> float:
    a, b = _sum(mine), _sum(theirs)
    return 1.0 if a == b else float(a / b) if b else float("inf")


@dataclass(frozen=True)
class Counted:
    """What a compiled program sends and needs."""

    sent: Totals
    scattered: Totals
    """With every all-reduce that is only sliced as a reduce-scatter."""
    temporary: int
    """Bytes of a device."""


def compare_bytes(shape: ModelShape, grid: GridShape, sequences: int, ways: Sequence[Way]) -> list[Comparison]:
    """Compares the bytes of a model of any depth on a grid of virtual devices; compiles one and two blocks.

    Explicit programs of all ways are compared with one automatic program, the first way's. Blocks are alike:
    the second one's bytes count for every further one. The explicit program's bytes at full depth are the predicted
    ones, which are compared with the compiled ones at two blocks. Raises ``UserError`` where model or batch do not
    divide over the grid, ``RuntimeError`` where prediction and program differ.
    """
    blocks = [replace(shape, layers=layers) for layers in (1, 2)]
    works = [ways[0].work(work, grid, sequences) for work in blocks]
    automatic = _extended([_count(_compile(_abstract(work, ways[0])[1], work), work) for work in works], shape.layers)
    comparisons = []
    for way in ways:
        works = [way.work(work, grid, sequences) for work in blocks]
        both = [_count(_compile(_abstract(work, way)[0], work), work) for work in works]
        if any(program.sent != totals(predict(work)) for program, work in zip(both, works, strict=True)):
            raise RuntimeError(f"the explicit program on {grid} does not communicate what is predicted")
        work = way.work(shape, grid, sequences)
        explicit = replace(_extended(both, shape.layers), sent=totals(predict(work)))
        comparisons.append(_comparison(work, explicit, automatic))
    return comparisons


def _comparison(work: StepSpec, explicit: Counted, automatic: Counted) -> Comparison:
    temporary = (explicit.temporary, automatic.temporary)
    return Comparison(work, explicit.sent, automatic.sent, automatic.scattered, temporary)


def _extended(both: Sequence[Counted], layers: int) -> Counted:
    """A program of so many blocks from those of one and of two."""
    one, two = both
    sent, scattered = (
        {key: (2 - layers) * a.get(key, Fraction(0)) + (layers - 1) * b.get(key, Fraction(0)) for key in {**a, **b}}
        for a, b in ((one.sent, two.sent), (one.scattered, two.scattered))
    )
    return Counted(sent, scattered, (2 - layers) * one.temporary + (layers - 1) * two.temporary)


def _abstract(work: StepSpec, way: Way) -> "tuple[TrainStep, TrainStep]":
    from flax import nnx

    from axonn_jax.core.models.transformer import Transformer
    from axonn_jax.core.tensor.params import split_module

    def parts(comm: BlockComm) -> "SplitModule":
        return split_module(
            nnx.eval_shape(lambda: Transformer(work.shape, rngs=nnx.Rngs(0), attention="xla", comm=comm, moe=way.moe))
        )

    return _steps((parts(work.comm), parts(ALL_REDUCE)), work, way)


def _steps(parts: "tuple[SplitModule, SplitModule]", work: StepSpec, way: Way) -> "tuple[TrainStep, TrainStep]":
    """The explicit step and the automatic one, with AdamW and clipping, of these parts."""
    import jax
    import optax
    from compiled.automatic import AutomaticProgram

    from axonn_jax.core.engines.program import StageProgram
    from axonn_jax.core.engines.step import TrainStep
    from axonn_jax.core.settings import MemoryConfig

    laid = build_grid(work.grid, jax.devices()[: work.grid.devices])
    memory = MemoryConfig(activations=way.activations, reshard_after=way.reshard_after)
    explicit = StageProgram(parts[0], laid, memory=memory)
    automatic = AutomaticProgram(parts[1], laid, memory=memory, constraints=way.constraints)
    return TrainStep(explicit, optax.adamw(1e-3), 1.0), TrainStep(automatic, optax.adamw(1e-3), 1.0)


def _compile(step: "TrainStep", work: StepSpec) -> "jax.stages.Compiled":

    rows = (work.policy.microbatches, work.sequences // work.policy.microbatches, work.shape.seq_len + 1)
    again = work.policy.activations != "none"  # the CPU backend would undo recomputation, of either program
    return step.compiled(rows, compiler_options=keep_recomputation() if again else None)


def _count(program: "jax.stages.Compiled", work: StepSpec) -> Counted:
    text = text_of(program)
    collected = collectives(text, mesh_sizes(work.grid))
    return Counted(totals(collected), totals_if_scattered(text, collected), temporary_bytes(program))


def compare_runs(
    shape: ModelShape, grid: GridShape, sequences: int, way: Way | None = None, rounds: int = 7
) -> Comparison:
    """Compares bytes and seconds of real steps on this process's devices, the two programs in turns.

    Both start from the same weights and see the same tokens. Raises ``UserError`` where model, batch and devices do
    not fit, ``RuntimeError`` where the two do not compute the same loss and gradients.
    """
    import jax
    import numpy as np
    from flax import nnx

    from axonn_jax.core.models.transformer import Transformer
    from axonn_jax.core.tensor.params import split_module

    way = way or Way()
    shape.check_grid(grid)
    grid.check_batch(sequences, way.microbatches)
    work = way.work(shape, grid, sequences)
    laid = build_grid(grid, jax.devices()[: grid.devices])
    with jax.set_mesh(laid.mesh):
        models = [Transformer(shape, rngs=nnx.Rngs(0), attention="xla", comm=comm) for comm in (work.comm, ALL_REDUCE)]
    steps = _steps((split_module(models[0]), split_module(models[1])), work, way)
    rows = (way.microbatches, sequences // way.microbatches, shape.seq_len + 1)
    programs = [_compile(step, work) for step in steps]
    tokens = np.random.default_rng(0).integers(0, shape.vocab, rows, dtype=np.int32)
    batch = jax.device_put(tokens, steps[0].program.batch_sharding())
    states = [_start(step) for step in steps]
    metrics: list[Any] = [None, None]

    def run(which: int) -> Any:
        states[which], metrics[which] = programs[which](states[which], batch, None)
        return states[which]

    run(0), run(1)
    _check_same(states, metrics)
    times = in_turns({"explicit": partial(run, 0), "automatic": partial(run, 1)}, rounds, warm_up=0)
    counted = _comparison(work, *(_count(program, work) for program in programs))
    if not rounds:
        return counted
    explicit, automatic = map(tuple, times.values())
    medians = statistics.median(explicit), statistics.median(automatic)
    return replace(counted, step_s=medians, rounds_s=(explicit, automatic))


def _start(step: "TrainStep") -> "TrainState":
    """Weights of its own, since a step's are donated to it, and the optimizer's first state."""
    import jax
    import jax.numpy as jnp

    from axonn_jax.core.engines.step import TrainState

    params = jax.tree.map(jnp.copy, step.program.parts.params)
    return TrainState(step.update.start(jax.device_put(params, step.program.shardings())), step.first_scale(), {})


def _check_same(states: Sequence[Any], metrics: Sequence[Mapping[str, Any]]) -> None:
    """After one step: equal losses, and equal first moments, which are then a tenth of the (clipped) gradients."""
    import numpy as np
    import optax

    losses = [float(metric["loss"]) for metric in metrics]
    if not abs(losses[0] - losses[1]) <= LOSS_TOLERANCE * abs(losses[1]):
        raise RuntimeError(f"the programs' losses differ: {losses[0]} and {losses[1]}")
    mine, theirs = (optax.tree_utils.tree_get(state.model.optimizer, "mu") for state in states)
    for name in theirs:
        a, b = np.asarray(mine[name], np.float64), np.asarray(theirs[name], np.float64)
        if not np.linalg.norm(a - b) <= GRADIENT_TOLERANCE * np.linalg.norm(b):
            raise RuntimeError(f"the programs' gradients of {name} differ by {np.linalg.norm(a - b)}")
