"""``axonn-jax bench vs_gspmd``: the explicit program beside automatic partitioning, grid by grid."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import geometric_mean
from typing import Annotated, Any

from axonn_jax.cli.bench.common import Constraints, make_devices, versions
from axonn_jax.cli.bench.gspmd import Comparison, Way, compare_bytes, compare_runs
from axonn_jax.cli_args import Arg, Positive
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.config import ModelShape
from axonn_jax.models.presets import preset
from axonn_jax.options import OLD_RESHARD_AFTER, OLD_RESIDUAL_COMM, Activations, ReshardAfter, ResidualComm
from axonn_jax.terminal import table

RUN_UP_TO = 16
"""Devices up to which steps are run, of a small model on every grid; beyond, published models are compiled."""
SMALL = ModelShape(layers=2, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=1024, seq_len=256)
"""What is run: one sequence a device."""
CHOSEN = 2.0
"""A grid that a user would choose sends at most this many times the bytes of the best grid of as many devices."""


@dataclass(frozen=True)
class VsGspmd:
    """The same model on the same mesh: this package's program beside plain jax.jit with NamedSharding on everything.

    Up to 16 devices a small model really runs, on every grid, the two in turns; beyond, published models are compiled
    for virtual CPU devices, on a sample of grids. Bytes are what a device sends in a step of one sequence a device and
    microbatch, on a ring, in float32.
    """

    devices: Annotated[tuple[int, ...], Arg(least=1)] = (8, 64, 512)
    """Numbers of devices, each in a process of its own."""
    models: tuple[str, ...] = ("gpt-5b", "gpt-20b")
    """Published models that are compiled (docs/train.md lists them)."""
    grids: tuple[str, ...] = ()
    """Only these grids, named as in d2z2y1x1 (data, z, y, x); left out: all, or beyond 16 devices a sample."""
    rounds: Positive = 7
    """Steps of either program that are timed, in turns."""
    gather: Annotated[tuple[ReshardAfter, ...], Arg(renamed=OLD_RESHARD_AFTER)] = ("forward",)
    """How long the explicit program keeps weights gathered over z (memory.reshard_after); each is a row of its own."""
    microbatches: Positive = 1
    """Of a step, in either program."""
    activations: Activations = "none"
    """What either program computes again in the backward pass."""
    constraints: Constraints = "layers"
    """Where automatic partitioning is told the layout of activations: behind every layer, every block, or nowhere."""
    inner_features: Annotated[ResidualComm, Arg(renamed=OLD_RESIDUAL_COMM)] = "all_reduce"
    """How the explicit program's blocks communicate (tensor.residual_comm): all_reduce, gather or auto."""
    json: bool = False
    """Print one JSON object instead of the table."""


_RATIOS = ("ratio", "ratio_scattered", "ratio_moved", "step_ratio")


def run(args: VsGspmd) -> int:
    """Compares, prints, and returns 0.

    Raises:
        UserError: a model or grid is unknown, or they do not fit.
    """
    grids = [_parsed(name) for name in args.grids]
    shapes = [preset(name) for name in args.models]
    if len(args.devices) == 1:
        rows = _rows(args, args.devices[0], grids, shapes)
    else:
        rows = [row for count in args.devices for row in _in_a_process(args, count)]
    figures = _figures(args, rows)
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _in_a_process(args: VsGspmd, count: int) -> list[dict[str, Any]]:
    """Rows for one number of devices: a process's number of virtual devices is fixed once jax has started."""
    flags = ["--devices", str(count), "--models", *args.models, "--rounds", str(args.rounds)]
    flags += ["--gather", *args.gather, "--microbatches", str(args.microbatches), "--activations", args.activations]
    flags += ["--constraints", args.constraints, "--inner_features", args.inner_features, "--json"]
    flags += ["--grids", *args.grids] if args.grids else []
    command = [sys.executable, "-m", "axonn_jax.cli.main", "bench", "vs_gspmd", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout)["rows"])


def _rows(args: VsGspmd, count: int, grids: Sequence[GridShape], shapes: Sequence[ModelShape]) -> list[dict[str, Any]]:
    make_devices(count)
    real = count <= RUN_UP_TO
    models = [("small", SMALL)] if real else list(zip(args.models, shapes, strict=True))
    compared: list[tuple[str, Comparison]] = []
    for model, shape in models:
        for grid in [grid for grid in grids or choose_grids(count, shape) if grid.devices == count]:
            for comparison in _compared(args, shape, grid, real):
                compared.append((model, comparison))
                line = f"{model}, {count} devices, {name(grid)}, {comparison.work.gather}: {comparison.ratio:.3f}"
                print(line, file=sys.stderr, flush=True)
    least = {model: min(comparison.least for name, comparison in compared if name == model) for model, _ in compared}
    return [_row(model, comparison, comparison.least <= CHOSEN * least[model]) for model, comparison in compared]


def _compared(args: VsGspmd, shape: ModelShape, grid: GridShape, real: bool) -> list[Comparison]:
    sequences = grid.devices * args.microbatches
    way = Way(args.microbatches, args.activations, constraints=args.constraints, inner_features=args.inner_features)
    ways = [replace(way, gather=gather) for gather in args.gather]
    if not real:
        return compare_bytes(shape, grid, sequences, ways)
    return [compare_runs(shape, grid, sequences, way, args.rounds) for way in ways]


def name(grid: GridShape) -> str:
    """A grid's short name, such as d2z2y1x1."""
    return f"d{grid.data}z{grid.z}y{grid.y}x{grid.x}"


def _parsed(text: str) -> GridShape:
    match = re.fullmatch(r"d(\d+)z(\d+)y(\d+)x(\d+)", text)
    if match is None:
        raise UserError("--grids", text, "names such as d2z2y1x1: the sizes of data, z, y and x")
    return GridShape(1, *map(int, match.groups()))


def choose_grids(devices: int, shape: ModelShape) -> list[GridShape]:
    """Every legal 4D grid up to 16 devices; beyond, a sample: one axis alone, and mixtures with `z` of 8 or more.

    The mixtures have every pair of `y` and `x` up to 16 together, so large single axes too, on which an
    explicit program could lose.
    """
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    legal = [
        grid
        for axes in product(sizes, repeat=4)
        if (grid := GridShape(1, *axes)).devices == devices and _fits(grid, shape, devices)
    ]
    if devices <= RUN_UP_TO:
        return legal

    def mixed(grid: GridShape) -> bool:
        return grid.z == 8 and (grid.y, grid.x) in {(1, 1), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2), (4, 4), (8, 8)}

    return [grid for grid in legal if mixed(grid) or devices in (grid.data, grid.z)]


def _fits(grid: GridShape, shape: ModelShape, sequences: int) -> bool:
    try:
        shape.check_grid(grid)
        grid.check_batch(sequences, 1)
    except UserError:
        return False
    return True


def _row(model: str, comparison: Comparison, chosen: bool) -> dict[str, Any]:
    sides = {
        "explicit": comparison.explicit,
        "automatic": comparison.automatic,
        "automatic_scattered": comparison.scattered,
    }
    worst = max(comparison.ratio, comparison.ratio_scattered, comparison.ratio_moved)
    keys = sorted({key for sums in sides.values() for key in sums})
    return {
        "model": model,
        "layers": comparison.work.shape.layers,
        "devices": comparison.work.grid.devices,
        "grid": asdict(comparison.work.grid),
        "name": name(comparison.work.grid),
        "gather": comparison.work.gather,
        "inner": asdict(comparison.work.comm),
        "bytes": {side: float(sum(sums.values())) for side, sums in sides.items()},
        "by": [
            {"kind": kind, "axes": axes, **{side: float(sums.get((kind, axes), 0)) for side, sums in sides.items()}}
            for kind, axes in keys
        ],
        "temporary_bytes": {"explicit": comparison.temporary[0], "automatic": comparison.temporary[1]},
        "ratio": comparison.ratio,
        "ratio_scattered": comparison.ratio_scattered,
        "ratio_moved": comparison.ratio_moved,
        "chosen": chosen,
        "reason": comparison.reason() if worst > 1 else "",
        "step_s": comparison.step_s,
        "step_ratio": None if comparison.step_s is None else comparison.step_s[0] / comparison.step_s[1],
        "rounds_s": comparison.rounds_s,
    }


def _figures(args: VsGspmd, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        raise UserError("--grids", " ".join(args.grids), f"a grid of {' or '.join(map(str, args.devices))} devices")

    def mean(key: str, rows: Sequence[dict[str, Any]]) -> float | None:
        values = [row[key] for row in rows if row[key]]
        return geometric_mean(values) if values else None

    chosen = [row for row in rows if row["chosen"]]
    return {
        "ratio": mean("ratio", rows),
        "ratio_scattered": mean("ratio_scattered", rows),
        "ratio_moved": mean("ratio_moved", rows),
        "ratio_chosen": mean("ratio", chosen),
        "largest_chosen": max(row["ratio"] for row in chosen),
        "largest_chosen_scattered": max(row["ratio_scattered"] for row in chosen),
        "step_ratio": mean("step_ratio", rows),
        "ratios": {f"{row['model']} {row['devices']} {row['name']} {row['gather']}": row["ratio"] for row in rows},
        "by_gather": {
            gather: {key: mean(key, [row for row in rows if row["gather"] == gather]) for key in _RATIOS}
            for gather in args.gather
        },
        "rows": list(rows),
        "small": asdict(SMALL),
        "constraints": args.constraints,
        "microbatches": args.microbatches,
        "activations": args.activations,
        "inner_features": args.inner_features,
        "dtype": "float32",
        "device": "virtual CPU devices",
        "versions": versions("jax", "jaxlib", "flax"),
    }


def _table(figures: dict[str, Any]) -> str:
    heads = (
        *("model", "devices", "grid", "gather", "explicit MB", "automatic MB", "ratio", "scattered", "moved"),
        *("temporary MB", "of automatic", "step", "chosen"),
    )
    cells = [
        (
            row["model"],
            str(row["devices"]),
            row["name"],
            row["gather"],
            f"{row['bytes']['explicit'] / 1e6:,.1f}",
            f"{row['bytes']['automatic'] / 1e6:,.1f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_scattered']:.3f}",
            f"{row['ratio_moved']:.3f}",
            f"{row['temporary_bytes']['explicit'] / 1e6:,.1f}",
            f"{row['temporary_bytes']['automatic'] / 1e6:,.1f}",
            "" if row["step_ratio"] is None else f"{row['step_ratio']:.2f}",
            "yes" if row["chosen"] else "",
        )
        for row in figures["rows"]
    ]
    lines = table(heads, cells)
    for at, row in enumerate(figures["rows"], start=1):
        lines[at] += f"  {row['reason']}" if row["reason"] else ""
    step = "" if figures["step_ratio"] is None else f"; step time {figures['step_ratio']:.3f}"
    return "\n".join(
        [
            "bytes a device sends in a step, explicit program over automatic partitioning; scattered: where a compiler",
            "makes reduce-scatters of automatic partitioning's all-reduces that are only sliced; moved: where it also",
            "moves sums of gradients out of the loop over microbatches; chosen: within twice the bytes of the best",
            "grid of as many devices",
            "",
            *lines,
            "",
            f"geometric means: bytes {figures['ratio']:.3f}, scattered {figures['ratio_scattered']:.3f}, "
            f"moved {figures['ratio_moved']:.3f}{step}",
            *(
                f"of gather {gather}: bytes {means['ratio']:.3f}, scattered {means['ratio_scattered']:.3f}, "
                f"moved {means['ratio_moved']:.3f}"
                for gather, means in figures["by_gather"].items()
                if len(figures["by_gather"]) > 1
            ),
            f"largest of chosen grids: {figures['largest_chosen']:.3f}, scattered "
            f"{figures['largest_chosen_scattered']:.3f}",
        ]
    )
