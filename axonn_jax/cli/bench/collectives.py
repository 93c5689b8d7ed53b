"""Bytes that a step's collectives send: as the formulas predict them beside those of the compiled program."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from axonn_jax.cli.bench.common import grid_of, make_devices, mesh_sizes, text_of, versions
from axonn_jax.cli_args import Arg
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape, build_grid
from axonn_jax.models.block_comm import choose_residual_comm
from axonn_jax.models.presets import preset
from axonn_jax.options import OLD_RESHARD_AFTER, OLD_RESIDUAL_COMM, Activations, ReshardAfter, ResidualComm
from axonn_jax.planner.communication.predict import predict
from axonn_jax.planner.communication.step import Predicted, StepSpec
from axonn_jax.planner.hlo.collectives import Collective, collectives
from axonn_jax.planner.machines.network import totals
from axonn_jax.terminal import table

if TYPE_CHECKING:
    import jax


class KindBytes(NamedTuple):
    """Bytes a device sends in a step for one kind of collective over one set of axes."""

    kind: str
    axes: str
    predicted: Fraction
    compiled: Fraction


@dataclass(frozen=True)
class Accounting:
    """Both sides of a comparison."""

    predicted: tuple[Predicted, ...]
    """What the formulas say, layer by layer."""
    compiled: tuple[Collective, ...]
    """What the compiled program has."""

    @property
    def rows(self) -> tuple[KindBytes, ...]:
        """Both sides' sums by kind and axes, every pair that either side has."""
        mine, theirs = totals(self.predicted), totals(self.compiled)
        none = Fraction(0)
        return tuple(KindBytes(*key, mine.get(key, none), theirs.get(key, none)) for key in sorted({**mine, **theirs}))

    @property
    def exact(self) -> bool:
        """Whether every row's sides are equal to the byte."""
        return all(row.predicted == row.compiled for row in self.rows)

    @property
    def ratio(self) -> float:
        """Compiled over predicted bytes, all together; 1 where neither side has any."""
        predicted, compiled = (sum(getattr(row, side) for row in self.rows) for side in ("predicted", "compiled"))
        if predicted == 0:
            return 1.0 if compiled == 0 else float("inf")
        return float(Fraction(compiled) / predicted)


def account(
    work: StepSpec, *, clip: float = 1.0, bucket: int = 16_000_000, devices: "Sequence[jax.Device] | None" = None
) -> Accounting:
    """Compiles the `Trainer`'s step for `work` with AdamW, and compares its collectives with the predicted ones.

    Nothing is allocated and nothing runs; with virtual CPU devices any grid compiles on one machine. The step is
    in float32: XLA's CPU compiler turns bfloat16 collectives into float32 ones. Recomputation is kept as written
    (`compat.keep_recomputation`). Raises ``UserError`` where grid,
    model, batch and devices do not fit, or the work is not a float32 one.
    """
    import jax
    import optax

    from axonn_jax import compat
    from axonn_jax.train.config import MemoryConfig, TensorConfig
    from axonn_jax.train.engines.step import compile_abstract

    if work.itemsize != 4:
        raise UserError("itemsize", work.itemsize, "4: compiled programs are compared in float32")
    if work.grid.pipe != 1:
        raise UserError("grid.pipe", work.grid.pipe, "1: the accounting is of one stage's mesh")
    predicted = predict(work)
    have = jax.devices() if devices is None else devices
    if len(have) < work.grid.devices:
        raise UserError("devices", len(have), f"at least {work.grid.devices}, the grid's product")
    grid = build_grid(work.grid, have[: work.grid.devices])
    program = compile_abstract(
        work.shape,
        grid,
        optax.adamw(1e-3),
        sequences=work.sequences,
        microbatches=work.microbatches,
        clip=clip,
        memory=MemoryConfig(activations=work.activations, bucket=bucket, reshard_after=work.gather),
        tensor=TensorConfig(scan_layers="yes" if work.scanned else "no"),
        comm=work.comm,
        moe=work.moe,
        compiler_options=compat.keep_recomputation(),
    )
    return Accounting(predicted, collectives(text_of(program), mesh_sizes(work.grid)))


@dataclass(frozen=True)
class Collectives:
    """Compile a training step for virtual CPU devices and compare what it communicates with the formulas.

    Nothing runs and no weights are made. Bytes are what a device sends in a step, on a ring, in float32.
    """

    model: str = "gpt-1.3b"
    """Name of a published model (docs/train.md lists them)."""
    layers: Annotated[int | None, Arg(default="the model's")] = None
    """Number of blocks: fewer compile faster."""
    devices: Annotated[int | None, Arg(default="the grid's product")] = None
    """Number of devices; what the grid's axes leave of them goes to grid.data."""
    grid: GridShape = field(default_factory=GridShape)
    """How the devices are arranged."""
    microbatches: int = 1
    """Parts a step's batch is processed in."""
    batch: Annotated[int | None, Arg(default="data * z * microbatches")] = None
    """Sequences a step, over all devices."""
    activations: Activations = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)
    or what was all-reduced (save_collectives)."""
    gather: Annotated[ReshardAfter, Arg(renamed=OLD_RESHARD_AFTER)] = "forward"
    """When gathered weights are let go (memory.reshard_after): after forward, backward or step."""
    scanned: bool = False
    """Whether layers are a loop's body (tensor.scan_layers), not unrolled."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over grid.y (memory.sequence_parallel)."""
    inner_features: Annotated[ResidualComm, Arg(renamed=OLD_RESIDUAL_COMM)] = "all_reduce"
    """How blocks communicate (tensor.residual_comm): all_reduce, gather or auto."""
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


def _work(args: Collectives) -> StepSpec:
    shape = preset(args.model, **({} if args.layers is None else {"layers": args.layers}))
    grid = grid_of(args.grid, args.devices)
    sequences = grid.batch_shards * args.microbatches if args.batch is None else args.batch
    wanted, split = args.inner_features, args.sequence_parallel
    comm = choose_residual_comm(wanted, shape, grid, args.activations, sequence_split=split)
    return StepSpec(
        shape,
        grid,
        sequences,
        args.microbatches,
        activations=args.activations,
        scanned=args.scanned,
        gather=args.gather,
        comm=comm,
    )


def _figures(args: Collectives, work: StepSpec, done: Accounting) -> dict[str, Any]:
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
            {
                "name": entry.name,
                "phase": entry.phase,
                "kind": entry.kind,
                "axes": entry.over,
                "bytes": float(entry.bytes),
            }
            for entry in done.predicted
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
        "sequence_parallel": work.comm.sequence_split,
        "inner": asdict(work.comm),
        "dtype": "float32",
        "device": jax.devices()[0].device_kind,
        "versions": versions("jax", "jaxlib"),
    }


def _table(work: StepSpec, done: Accounting) -> str:
    heads = ("kind", "axes", "predicted, bytes", "compiled, bytes")
    cells = [(row.kind, row.axes, f"{float(row.predicted):,.0f}", f"{float(row.compiled):,.0f}") for row in done.rows]
    lines = table(heads, cells, left=(0, 1))
    verdict = "equal to the byte" if done.exact else "NOT equal"
    first = (
        f"{work.shape.layers} layers, grid {work.grid}, microbatches {work.microbatches}; bytes a device sends a step"
    )
    return "\n".join([first, "", *lines, "", f"compiled / predicted: {done.ratio:.6f} ({verdict})"])
