"""``axonn-jax bench memory``: what every activation policy needs in memory, and costs in time."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

from axonn_jax.cli.bench.common import SMALL, SMALL_ROWS, make_devices, versions
from axonn_jax.cli.bench.compile_time import Setting, compile_cost, step_times
from axonn_jax.cli_args import NotNegative, Positive
from axonn_jax.distributed.cpu_allocator import keep_freed_memory
from axonn_jax.documents import save_picture
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.presets import preset
from axonn_jax.options import Activations
from axonn_jax.terminal import table

POLICIES: tuple[Activations, ...] = get_args(Activations)


@dataclass(frozen=True)
class Memory:
    """Compile a training step of a large model under every activation policy, and time a small one's.

    Bytes are a device's, from XLA's analysis of the compiled program: nothing of the large model is allocated. Layers
    are scanned, since XLA's CPU backend undoes recomputation in unrolled ones. A backend that has no host memory of its
    own, as the CPU's, counts what `offload` sends there among its temporaries.
    """

    model: str = "gpt-1.3b"
    """Name of a published model (docs/train.md lists them)."""
    grid: GridShape = field(default_factory=GridShape)
    """How the devices are arranged."""
    rows: Positive = 1
    """Sequences of a microbatch on each device."""
    steps: NotNegative = 7
    """Steps of a small model that are timed under every policy, in turns; 0: none."""
    png: str = ""
    """Also draw a picture into this file."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Memory) -> int:
    """Compiles, runs and prints.

    Raises:
        UserError: the model is unknown, or model, grid and options do not fit.
    """
    shape = preset(args.model)
    if args.grid.pipe != 1:
        raise UserError("grid.pipe", args.grid.pipe, "1: this compiles one stage's step")
    if args.png and not (Path(args.png).suffix == ".png" and Path(args.png).absolute().parent.is_dir()):
        raise UserError("--png", args.png, "a .png file in a directory that exists")
    keep_freed_memory()  # as a training run does
    make_devices(args.grid.devices)
    sequences = args.rows * args.grid.batch_shards
    costs = {policy: compile_cost(Setting(shape, args.grid, True, sequences, 1, policy)) for policy in POLICIES}
    times: dict[Activations, list[float]] = {}
    if args.steps:
        settings = [Setting(SMALL, GridShape(), True, SMALL_ROWS, 1, policy) for policy in POLICIES]
        times = dict(zip(POLICIES, step_times(settings, args.steps), strict=True))
    figures = _figures(args, costs, times)
    if args.png:
        _draw(figures, Path(args.png))
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _figures(args: Memory, costs: dict[Activations, Any], times: dict[Activations, list[float]]) -> dict[str, Any]:
    import jax

    rows = {
        policy: {
            "temporary_bytes": cost.temporary_bytes,
            "argument_bytes": cost.argument_bytes,
            "of_none": cost.temporary_bytes / costs["none"].temporary_bytes,
            "small_step_s": times.get(policy),
            "small_step_of_none": median(times[policy]) / median(times["none"]) if times else None,
        }
        for policy, cost in costs.items()
    }
    return {
        "ratios": {policy: row["of_none"] for policy, row in rows.items()},
        "policies": rows,
        "model": args.model,
        "grid": asdict(args.grid),
        "rows": args.rows,
        "small_model": asdict(SMALL),
        "dtype": "float32",
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib"),
    }


def _table(figures: dict[str, Any]) -> str:
    heads = ("activations", "temporary, MB", "of none", "arguments, MB", "small step, s", "of none")
    cells = [
        (
            policy,
            f"{row['temporary_bytes'] / 1e6:,.0f}",
            f"{row['of_none']:.2f}",
            f"{row['argument_bytes'] / 1e6:,.0f}",
            f"{median(row['small_step_s']):.3f}" if row["small_step_s"] else "-",
            f"{row['small_step_of_none']:.2f}" if row["small_step_s"] else "-",
        )
        for policy, row in figures["policies"].items()
    ]
    lines = table(heads, cells, left=(0,))
    first = f"{figures['model']}, {figures['rows']} rows a device, float32, grid {figures['grid']}"
    return "\n".join([first, "", *lines])


def _draw(figures: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = figures["policies"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.subplots()
    names = list(rows)
    left.bar(names, [rows[name]["temporary_bytes"] / 1e9 for name in names], width=0.5, color="tab:blue")
    left.set_ylabel("temporaries of a device, GB")
    left.set_title(f"{figures['model']}, {figures['rows']} rows a device, float32: memory by activation policy")
    if all(row["small_step_s"] for row in rows.values()):
        right = left.twinx()
        right.plot(names, [rows[name]["small_step_of_none"] for name in names], "o", color="tab:orange")
        right.set_ylabel("step time of a small model, over none's")
        right.set_ylim(bottom=0)
    save_picture(figure, path, dpi=120)
