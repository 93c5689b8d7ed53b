"""``axonn-jax bench collectives``: a step's communication, compiled beside predicted."""

import json
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Annotated, Any

from tyro.conf import arg

from axonn_jax.accounting import Accounting, account
from axonn_jax.cli.virtual import make_devices
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.inner import InnerFeatures, choose_inner
from axonn_jax.models.presets import preset
from axonn_jax.planner.communication import Gather, Recompute, Work
from axonn_jax.version import __version__


@dataclass(frozen=True)
class Collectives:
    """Compile a training step for virtual CPU devices and compare what it communicates with the formulas.

    Nothing runs and no weights are made. Bytes are what a device sends in a step, on a ring, in float32.
    """

    model: str = "gpt-1.3b"
    """Name of a published model (docs/config.md lists them)."""
    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Number of blocks: fewer compile faster."""
    devices: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the grid's product)")] = None
    """Number of devices; what the grid's axes leave of them goes to grid.data."""
    grid: GridShape = field(default_factory=GridShape)
    """How the devices are arranged."""
    microbatches: int = 1
    """Parts a step's batch is processed in."""
    batch: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: data * z * microbatches)")] = None
    """Sequences a step, over all devices."""
    activations: Recompute = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)
    or what was all-reduced (save_collectives)."""
    gather: Gather = "layer"
    """How long gathered weights live (memory.gather): layer, pass or step."""
    scanned: bool = False
    """Whether layers are a loop's body (train.scan_layers), not unrolled."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over grid.y (memory.sequence_parallel)."""
    inner_features: InnerFeatures = "y"
    """What splits the features inside blocks (train.inner_features): y, yx or auto."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Collectives) -> int:
    """Compiles, compares and prints; status 1 where the two sides differ.

    Raises:
        UserError: the model is unknown, or model, batch, grid and devices do not fit.
    """
    work = _work(args)
    make_devices(work.grid.devices)
    done = account(work)
    print(json.dumps(_figures(args, work, done)) if args.json else _table(work, done))
    return 0 if done.exact else 1


def _work(args: Collectives) -> Work:
    shape = preset(args.model, **({} if args.layers is None else {"layers": args.layers}))
    grid = args.grid
    if args.devices is not None and args.devices != grid.devices:
        if args.devices < 1 or args.devices % grid.devices:
            raise UserError("--devices", args.devices, f"a multiple of the grid's product, which is {grid.devices}")
        grid = replace(grid, data=grid.data * args.devices // grid.devices)
    sequences = grid.batch_shards * args.microbatches if args.batch is None else args.batch
    split = args.sequence_parallel
    inner = choose_inner(args.inner_features, shape, grid, args.activations, sequence_parallel=split)
    return Work(
        shape,
        grid,
        sequences,
        args.microbatches,
        activations=args.activations,
        scanned=args.scanned,
        gather=args.gather,
        sequence_parallel=split,
        inner=inner,
    )


def _figures(args: Collectives, work: Work, done: Accounting) -> dict[str, Any]:
    import jax

    rows = [
        {"kind": row.kind, "axes": row.axes, "predicted": float(row.predicted), "compiled": float(row.compiled)}
        for row in done.rows
    ]
    return {
        "ratio": done.ratio,
        "exact": done.exact,
        "rows": rows,
        "predicted": [
            {"name": one.name, "phase": one.phase, "kind": one.kind, "axes": one.over, "bytes": float(one.bytes)}
            for one in done.predicted
        ],
        "model": args.model,
        "layers": work.shape.layers,
        "grid": asdict(work.grid),
        "devices": work.grid.devices,
        "microbatches": work.microbatches,
        "sequences": work.sequences,
        "activations": work.activations,
        "scanned": work.scanned,
        "gather": work.gather,
        "sequence_parallel": work.sequence_parallel,
        "inner": asdict(work.inner),
        "dtype": "float32",
        "device": jax.devices()[0].device_kind,
        "versions": {"axonn_jax": __version__, **{name: metadata.version(name) for name in ("jax", "jaxlib")}},
    }


def _table(work: Work, done: Accounting) -> str:
    heads = ("kind", "axes", "predicted, bytes", "compiled, bytes")
    cells = [(row.kind, row.axes, f"{float(row.predicted):,.0f}", f"{float(row.compiled):,.0f}") for row in done.rows]
    widths = [max(len(row[at]) for row in (heads, *cells)) for at in range(len(heads))]
    lines = [
        f"{one[0]:{widths[0]}}  {one[1]:{widths[1]}}  {one[2]:>{widths[2]}}  {one[3]:>{widths[3]}}"
        for one in (heads, *cells)
    ]
    verdict = "equal to the byte" if done.exact else "NOT equal"
    first = (
        f"{work.shape.layers} layers, grid {work.grid}, microbatches {work.microbatches}; bytes a device sends a step"
    )
    return "\n".join([first, "", *lines, "", f"compiled / predicted: {done.ratio:.6f} ({verdict})"])
