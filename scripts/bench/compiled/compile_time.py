"""Costs of a step: to compile, layers scanned beside layers unrolled, and to run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from compiled.common import temporary_bytes
from hlo.steps import instructions
from racer import in_turns

from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import Activations

if TYPE_CHECKING:
    from axonn_jax.core.settings import MemoryConfig, TensorConfig


@dataclass(frozen=True)
class Setting:
    """A step to compile, with AdamW and clipping, in float32."""

    shape: ModelShape
    grid: GridShape
    scanned: bool
    sequences: int
    """Of a step, over all devices."""
    microbatches: int = 1
    activations: Activations = "none"
    comm: BlockComm = ALL_REDUCE
    """How blocks communicate with the residual stream."""


@dataclass(frozen=True)
class CompileCost:
    """What compiling took and gave."""

    layers: int
    scanned: bool
    model_s: tuple[float, ...]
    """Seconds to lay the model out (shapes alone), of every round."""
    compile_s: tuple[float, ...]
    """Seconds from there to the compiled program, traced and lowered from nothing, of every round."""
    instructions: int
    """Instructions of the compiled program, all its computations together."""
    argument_bytes: int
    """Parameters, optimizer state and batch, of a device."""
    temporary_bytes: int
    """What a device needs beside them."""

    @property
    def median_s(self) -> float:
        """Median of `compile_s`."""
        return median(self.compile_s)


def compile_cost(setting: Setting, rounds: int = 1) -> CompileCost:
    """Compiles a setting's step for this process's (virtual) devices, as often as `rounds` says.

    Neither weights are made nor steps run, and jax forgets what it has traced. A compilation cache on disk must be off
    for the seconds to mean anything. Raises ``UserError`` where model, batch, grid and devices do not fit.
    """
    import jax

    model_s, compile_s = [], []
    rows = (setting.microbatches, setting.sequences // setting.microbatches, setting.shape.seq_len + 1)
    for _ in range(rounds):
        jax.clear_caches()
        begin = time.perf_counter()
        step = _step(setting)
        laid = time.perf_counter()
        program = step.compiled(rows)
        compile_s.append(time.perf_counter() - laid)
        model_s.append(laid - begin)
    memory: Any = program.memory_analysis()
    return CompileCost(
        setting.shape.layers,
        setting.scanned,
        tuple(model_s),
        tuple(compile_s),
        instructions(program),
        int(memory.argument_size_in_bytes),
        temporary_bytes(program),
    )


def step_times(settings: Sequence[Setting], rounds: int) -> list[list[float]]:
    """Seconds of real steps of every setting's trainer, in turns, after one that is not timed; same weights and tokens.

    Raises ``UserError`` where model, batch, grid and devices do not fit, ``RuntimeError`` where the losses of two
    settings differ by more than rounding.
    """
    import jax
    import numpy as np
    import optax
    from flax import nnx

    from axonn_jax.core.models.transformer import Transformer
    from axonn_jax.trainer import Trainer

    trainers = []
    for setting in settings:
        grid = build_grid(setting.grid, jax.devices()[: setting.grid.devices])
        with jax.set_mesh(grid.mesh):
            model = Transformer(setting.shape, rngs=nnx.Rngs(0), comm=setting.comm)
        memory, tensor = _configs(setting)
        options: Any = {"microbatches": setting.microbatches, "clip": 1.0, "memory": memory, "tensor": tensor}
        trainers.append(Trainer(model, optax.adamw(1e-3), grid, **options))
    shape = settings[0].shape
    batch = np.random.default_rng(0).integers(0, shape.vocab, (settings[0].sequences, shape.seq_len + 1))
    losses: list[list[Any]] = [[] for _ in settings]

    def step(number: int) -> Any:
        losses[number].append(trainers[number].step(batch)["loss"])
        return losses[number][-1]  # of the one program that also makes the parameters

    times = in_turns({str(n): partial(step, n) for n in range(len(settings))}, rounds, warm_up=1)
    for number, found in enumerate(zip(*losses, strict=True), start=1):
        if float(max(found)) - float(min(found)) > 1e-4 * abs(float(found[0])):
            raise RuntimeError(f"losses of step {number} differ: {found}")
    return list(times.values())


def _step(setting: Setting) -> Any:
    """The step of a setting, for shapes alone."""
    import jax
    import optax

    from axonn_jax.core.engines.step import abstract, build_step
    from axonn_jax.core.tensor.params import split_module

    grid = build_grid(setting.grid, jax.devices()[: setting.grid.devices])
    model, _ = abstract(setting.shape, grid, setting.sequences, setting.microbatches, comm=setting.comm)
    _, _, step = build_step(model, split_module(model), optax.adamw(1e-3), grid, 1.0, *_configs(setting))
    return step


def _configs(setting: Setting) -> "tuple[MemoryConfig, TensorConfig]":
    from axonn_jax.core.settings import MemoryConfig, TensorConfig

    memory = MemoryConfig(precision="fp32", activations=setting.activations)
    return memory, TensorConfig(scan_layers="yes" if setting.scanned else "no")
