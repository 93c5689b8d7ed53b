"""``axonn-jax bench compile``: what a step costs to compile as layers grow in number, scanned and unrolled."""

import json
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Annotated, Any

from axonn_jax.cli.bench.common import SMALL, SMALL_ROWS, make_devices, versions
from axonn_jax.cli.bench.compile_time import CompileCost, Setting, compile_cost, step_times
from axonn_jax.cli_args import Arg, NotNegative, Positive
from axonn_jax.distributed.cpu_allocator import keep_freed_memory
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.presets import preset
from axonn_jax.options import Activations
from axonn_jax.terminal import table


@dataclass(frozen=True)
class Compile:
    """Compile a training step for virtual CPU devices with few and with many layers, scanned and unrolled.

    Seconds are from the model's shapes to the compiled program: tracing, lowering and XLA, nothing cached. Then steps
    of a small model are run on one device, both ways in turns.
    """

    model: str = "gpt-5b"
    """Name of a published model (docs/train.md lists them), of which the number of layers is changed."""
    scanned: Annotated[tuple[int, ...], Arg(least=2)] = (12, 24, 48, 96)
    """Numbers of layers that are compiled scanned."""
    unrolled: Annotated[tuple[int, ...], Arg(least=1)] = (12, 24, 48)
    """Numbers of layers that are compiled unrolled."""
    grid: GridShape = field(default_factory=lambda: GridShape(data=2, z=2, y=2, x=2))
    """How the devices are arranged."""
    microbatches: Positive = 2
    """Parts a step's batch is processed in."""
    activations: Activations = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)
    or what was all-reduced (save_collectives)."""
    rounds: Positive = 3
    """Times everything scanned is compiled; unrolled steps once."""
    steps: NotNegative = 7
    """Steps of the small model that are timed, scanned and unrolled in turns; 0: none."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Compile) -> int:
    """Compiles, runs and prints.

    Raises:
        UserError: the model is unknown, or model and grid do not fit.
    """
    shape = preset(args.model)
    if args.grid.pipe != 1:
        raise UserError("grid.pipe", args.grid.pipe, "1: this compiles one stage's step")
    keep_freed_memory()  # as a training run does
    import jax

    make_devices(args.grid.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    sequences = args.grid.batch_shards * args.microbatches
    base = Setting(shape, args.grid, False, sequences, args.microbatches, args.activations)
    compile_cost(replace(base, shape=replace(shape, layers=2)))  # what the first compilation of a process costs
    wanted = [(True, layers, args.rounds) for layers in args.scanned] + [(False, layers, 1) for layers in args.unrolled]
    costs = [
        compile_cost(replace(base, shape=replace(shape, layers=layers), scanned=scanned), rounds)
        for scanned, layers, rounds in wanted
    ]
    figures = _figures(args, costs, _steps(args))
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _steps(args: Compile) -> dict[str, Any] | None:
    if not args.steps:
        return None
    settings = [Setting(SMALL, GridShape(), scanned, SMALL_ROWS, 1, args.activations) for scanned in (True, False)]
    scanned, unrolled = step_times(settings, args.steps)
    return {
        "model": asdict(SMALL),
        "sequences": SMALL_ROWS,
        "scanned_s": scanned,
        "unrolled_s": unrolled,
        "scanned_over_unrolled": median(scanned) / median(unrolled),
    }


def _figures(args: Compile, costs: list[CompileCost], steps: dict[str, Any] | None) -> dict[str, Any]:
    import jax

    scanned = sorted((cost for cost in costs if cost.scanned), key=lambda cost: cost.layers)
    return {
        "ratio": scanned[-1].median_s / scanned[0].median_s if len(scanned) > 1 else None,
        "instructions_ratio": scanned[-1].instructions / scanned[0].instructions if len(scanned) > 1 else None,
        "of_layers": [scanned[-1].layers, scanned[0].layers] if len(scanned) > 1 else None,
        "compiled": [{**asdict(cost), "median_s": cost.median_s} for cost in costs],
        "steps": steps,
        "model": args.model,
        "grid": asdict(args.grid),
        "microbatches": args.microbatches,
        "activations": args.activations,
        "dtype": "float32",
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib"),
    }


def _table(figures: dict[str, Any]) -> str:
    heads = ("layers", "", "compile, s", "model, s", "instructions", "temporary, MB", "arguments, MB")
    cells = [
        (
            str(row["layers"]),
            "scanned" if row["scanned"] else "unrolled",
            f"{row['median_s']:.2f}",
            f"{median(row['model_s']):.2f}",
            f"{row['instructions']:,}",
            f"{row['temporary_bytes'] / 1e6:,.1f}",
            f"{row['argument_bytes'] / 1e6:,.1f}",
        )
        for row in figures["compiled"]
    ]
    lines = table(heads, cells, left=(1,))
    settings = ", ".join(f"{name} {figures[name]}" for name in ("grid", "microbatches", "activations"))
    first = f"{figures['model']} with other numbers of layers, {settings}"
    ends = []
    if figures["ratio"] is not None:
        many, few = figures["of_layers"]
        ends.append(
            f"scanned, {many} layers over {few}: compile time {figures['ratio']:.2f}, instructions "
            f"{figures['instructions_ratio']:.2f}"
        )
    if (steps := figures["steps"]) is not None:
        ends.append(
            f"a step of {steps['model']['layers']} layers: scanned {median(steps['scanned_s']):.3f} s, unrolled "
            f"{median(steps['unrolled_s']):.3f} s, ratio {steps['scanned_over_unrolled']:.2f}"
        )
    return "\n".join([first, "", *lines, "", *ends])
