"""``axonn-jax bench experts``: what experts communicate beside automatic partitioning, and the paper's facts."""

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from statistics import geometric_mean
from typing import Any

from axonn_jax.cli.bench.common import make_devices, versions
from axonn_jax.cli_args import Positive
from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import MESH_AXES, GridShape
from axonn_jax.models.config import ModelShape
from axonn_jax.options import Dispatch
from axonn_jax.planner.cost_model import ted
from axonn_jax.terminal import table

SMALL = ModelShape(
    layers=4, hidden=256, heads=8, kv_heads=8, ffn=512, vocab=1024, seq_len=256, positions="rope", norm="rmsnorm",
    mlp="swiglu", bias="none", tied=False, experts=8, experts_per_token=2,
)  # fmt: skip
"""What is compiled: one sequence a device."""
WAYS: tuple[Dispatch, ...] = ("gather", "capacity")


@dataclass(frozen=True)
class Experts:
    """Compile a small mixture of experts on every grid, beside automatic partitioning of one-hot einsums.

    Bytes are what a device sends in a step, on a ring, in float32. The einsums have slots as dispatch "capacity" has;
    "gather" drops no token.
    """

    devices: Positive = 8
    """Number of virtual CPU devices."""
    paper: bool = False
    """Print DeepSpeed-TED's published facts beside this package's, and compile nothing."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Experts) -> int:
    """Compiles, compares and prints; returns 0."""
    if args.paper:
        facts = ted.facts()
        heads = ("claim", "published", "here", "source")
        print(
            json.dumps([fact._asdict() for fact in facts])
            if args.json
            else "\n".join(table(heads, facts, (0, 1, 2, 3)))
        )
        return 0
    make_devices(args.devices)
    rows = [_row(grid) for grid in _grids(args.devices)]
    best = [min(row["ratios"].values()) for row in rows]
    sums = {way: geometric_mean(row["ratios"][way] for row in rows) for way in WAYS}
    figures = {
        "geometric_means": sums | {"the better of both": geometric_mean(best)},
        "largest": {way: max(row["ratios"][way] for row in rows) for way in WAYS} | {"the better of both": max(best)},
        "rows": rows,
        "model": asdict(SMALL),
        "versions": versions("jax", "jaxlib"),
    }
    print(json.dumps(figures) if args.json else _text(figures))
    return 0


def _grids(devices: int) -> list[GridShape]:
    """Every grid of so many devices that the model divides over."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    legal = [dict(zip(MESH_AXES, axes, strict=True)) for axes in product(sizes, repeat=5) if prod(axes) == devices]
    return [GridShape(**axes) for axes in legal if SMALL.experts % axes["expert"] == 0]


def _row(grid: GridShape) -> dict[str, Any]:
    from axonn_jax.cli.bench.gspmd import Way, compare_bytes

    ways = [Way(moe=MoeConfig(dispatch=way, balance_weight=0.0)) for way in WAYS]
    compared = dict(zip(WAYS, compare_bytes(SMALL, grid, grid.devices, ways), strict=True))
    # With reduce-scatters where XLA's CPU backend has only all-reduces: at its best.
    ratios = {way: max(both.ratio, both.ratio_scattered) for way, both in compared.items()}
    print(f"{grid}: {', '.join(f'{way} {ratio:.2f}' for way, ratio in ratios.items())}", file=sys.stderr, flush=True)
    sent: dict[str, float] = {way: float(sum(both.explicit.values())) for way, both in compared.items()}
    sent["automatic"] = float(sum(compared["gather"].scattered.values()))
    return {"grid": asdict(grid), "bytes": sent, "ratios": ratios}


def _text(figures: dict[str, Any]) -> str:
    heads = (*MESH_AXES, "gather, MB", "capacity, MB", "automatic, MB", "gather", "capacity")
    cells = [
        (
            *(str(row["grid"][axis]) for axis in MESH_AXES),
            *(f"{row['bytes'][name] / 1e6:.1f}" for name in (*WAYS, "automatic")),
            *(f"{row['ratios'][way]:.2f}" for way in WAYS),
        )
        for row in figures["rows"]
    ]
    ends = [
        f"{name}: geometric mean {mean:.2f}, largest {figures['largest'][name]:.2f}"
        for name, mean in figures["geometric_means"].items()
    ]
    return "\n".join([*table(heads, cells), "", "Bytes over automatic partitioning:", *ends])
