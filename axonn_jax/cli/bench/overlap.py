"""``axonn-jax bench overlap``: what runs beside a step's collectives in the schedule that XLA makes for a GPU."""

import json
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Annotated, Any

from axonn_jax.cli.bench.common import grid_of, mesh_sizes, temporary_bytes, text_of, versions
from axonn_jax.cli_args import Arg, Positive
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.hardware import H100
from axonn_jax.models.block_comm import choose_residual_comm
from axonn_jax.models.config import ModelShape
from axonn_jax.models.presets import preset
from axonn_jax.options import OLD_RESIDUAL_COMM, Activations, Order, ResidualComm
from axonn_jax.planner.hlo.overlap import MAIN, Share, measure, share, shares
from axonn_jax.planner.hlo.overlap import OverlapReport as Measured
from axonn_jax.terminal import table

_NODE = H100.node_devices


@dataclass(frozen=True)
class Overlap:
    """Compile a training step in bf16 for H100 GPUs, none of which is needed, and examine the schedule.

    For every class of collectives: the share of bytes with a matmul between start and done, and the share of modelled
    time that the device computes meanwhile, with the package's overlap on and off and by automatic partitioning. Needs
    the package's extra `aot`.
    """

    model: str = "gpt-5b"
    """Name of a published model (docs/train.md lists them)."""
    layers: Annotated[int | None, Arg(default="the model's")] = None
    """Number of blocks: fewer compile faster."""
    devices: Annotated[int | None, Arg(default="the grid's product")] = None
    """Number of GPUs, a multiple of 8; what the grid's axes leave of them goes to grid.data."""
    grid: GridShape = field(default_factory=lambda: GridShape(data=2, z=4, y=2, x=2))
    """How the GPUs are arranged."""
    rows: Positive = 4
    """Sequences of a microbatch on a device."""
    microbatches: Positive = 2
    """Parts a step's batch is processed in."""
    activations: Activations = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)."""
    inner_features: Annotated[ResidualComm, Arg(renamed=OLD_RESIDUAL_COMM)] = "all_reduce"
    """How the package's blocks communicate (tensor.residual_comm): all_reduce, gather or auto."""
    streams: Positive = 2
    """Parts of a microbatch's rows that run side by side, as tensor.sub_batches; a divisor of rows."""
    order: bool = True
    """Whether the package orders the computation, as tensor.order."""
    off: bool = True
    """Whether to compile the same step with overlaps off, one stream in XLA's order, to compare with."""
    automatic: bool = True
    """Whether to compile the same step by automatic partitioning (`jax.jit` with layouts), to compare with."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Overlap) -> int:
    """Compiles, examines and prints.

    Raises:
        UserError: the model is unknown; model, grid, rows and devices do not fit; or there is no compiler for GPUs.
    """
    shape = preset(args.model, **({} if args.layers is None else {"layers": args.layers}))
    layout = grid_of(args.grid, args.devices)
    _check(args, shape, layout)
    programs = {"on": _Variant(args.streams, args.order)}
    if args.off:
        programs["off"] = _Variant()
    if args.automatic:
        programs["automatic"] = _Variant(automatic=True)
    done = {name: _compiled(args, shape, layout, program) for name, program in programs.items()}
    print(json.dumps(_figures(args, shape, layout, done)) if args.json else _table(args, shape, layout, done))
    return 0


def _check(args: Overlap, shape: ModelShape, layout: GridShape) -> None:
    """What would otherwise fail later, or in words that do not name a flag."""
    if layout.pipe != 1:
        raise UserError("grid.pipe", layout.pipe, "1: this examines one stage's step")
    if layout.devices % _NODE:
        raise UserError("--devices", layout.devices, f"a multiple of {_NODE}, the GPUs of a node")
    if args.rows % args.streams:
        raise UserError("--streams", args.streams, f"a divisor of --rows, which is {args.rows}")
    shape.check_grid(layout)
    choose_residual_comm(args.inner_features, shape, layout, args.activations)


@dataclass(frozen=True)
class _Variant:
    """Which program to compile."""

    streams: int = 1
    ordered: bool = False
    automatic: bool = False

    def __str__(self) -> str:
        if self.automatic:
            return "automatic partitioning"
        return f"streams {self.streams}, order {'package' if self.ordered else 'xla'}"


@dataclass(frozen=True)
class _Done:
    """A compiled step, examined."""

    program: _Variant
    overlap: Measured
    temporaries: int
    """Bytes a device needs beside parameters and optimizer state."""


def _compiled(args: Overlap, shape: ModelShape, layout: GridShape, program: _Variant) -> _Done:
    compiled = _compile(args, shape, layout, program)
    return _Done(program, measure(text_of(compiled), mesh_sizes(layout), H100), temporary_bytes(compiled))


def _compile(args: Overlap, shape: ModelShape, layout: GridShape, program: _Variant) -> Any:
    import jax
    import optax

    from axonn_jax import compat
    from axonn_jax.cli.bench.automatic import compile_automatic
    from axonn_jax.grid import build_grid
    from axonn_jax.train.config import MemoryConfig, TensorConfig
    from axonn_jax.train.engines.step import compile_abstract

    if not compat.backends_started():
        jax.config.update("jax_platforms", "cpu")
    target = resources.files("axonn_jax.planner").joinpath("targets", "h100.txtpb").read_text()
    try:
        devices = compat.described_gpus(layout.devices // _NODE, _NODE, target)
    except LookupError as error:
        raise UserError("bench overlap", str(error), "the extra `aot`: pip install 'axonn_jax[aot]'") from None
    step: dict[str, Any] = {
        "sequences": args.rows * layout.batch_shards * args.microbatches,
        "microbatches": args.microbatches,
        "attention": "xla",  # the fused kernel cannot be compiled without cuDNN
    }
    where = (shape, build_grid(layout, devices), optax.adamw(1e-3))
    if program.automatic:
        return compile_automatic(*where, **step, precision="bf16", activations=args.activations)
    inner = choose_residual_comm(args.inner_features, shape, layout, args.activations)
    memory = MemoryConfig(precision="bf16", activations=args.activations)
    order: Order = "package" if program.ordered else "xla"
    tensor = TensorConfig(sub_batches=program.streams, order=order, scan_layers="no")
    return compile_abstract(*where, **step, memory=memory, tensor=tensor, comm=inner)


def _figures(args: Overlap, shape: ModelShape, layout: GridShape, done: dict[str, _Done]) -> dict[str, Any]:
    def row(part: Share) -> dict[str, Any]:
        return {**asdict(part), "of_bytes": part.of_bytes, "of_time": part.of_time}

    def program(compiled: _Done) -> dict[str, Any]:
        classes = {kind: row(part) for kind, part in shares(compiled.overlap.windows).items()}
        return {
            **asdict(compiled.program),
            "classes": classes,
            "all": row(share(compiled.overlap.windows)),
            "compute_s": compiled.overlap.compute_s,
            "step_s": compiled.overlap.step_s,
            "temporary_bytes": compiled.temporaries,
        }

    ratios = {
        name: {
            kind: {"bytes": part.of_bytes, "time": part.of_time}
            for kind, part in shares(compiled.overlap.windows).items()
            if kind in MAIN
        }
        for name, compiled in done.items()
    }
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return {
        "ratios": ratios,
        "programs": {name: program(compiled) for name, compiled in done.items()},
        "model": args.model,
        "layers": shape.layers,
        "grid": asdict(layout),
        "devices": layout.devices,
        "rows": args.rows,
        "microbatches": args.microbatches,
        "activations": args.activations,
        "inner": asdict(choose_residual_comm(args.inner_features, shape, layout, args.activations)),
        "dtype": "bfloat16",
        "machine": asdict(H100),
        "versions": versions(*packages),
    }


def _table(args: Overlap, shape: ModelShape, layout: GridShape, done: dict[str, _Done]) -> str:
    heads = ("program", "collectives", "MB a step", "beside a matmul", "ms", "time hidden")
    rows = []
    for name, compiled in done.items():
        windows = compiled.overlap.windows
        sums: dict[str, Share] = {str(kind): part for kind, part in shares(windows).items()}
        sums["the four together"] = share(w for w in windows if w.kind in MAIN)
        sums["all together"] = share(windows)
        for kind, part in sums.items():
            sizes = (f"{part.bytes / 1e6:,.1f}", _percent(part.of_bytes))
            rows.append((name, kind, *sizes, f"{part.seconds * 1e3:,.2f}", _percent(part.of_time)))
    lines = table(heads, rows, left=(0, 1))
    first = (
        f"{args.model}, {shape.layers} layers, grid {layout}, {args.rows} rows x {args.microbatches} microbatches, "
        f"activations {args.activations}, bf16"
    )
    ends = [
        f"{name}: {compiled.program}; modelled step {compiled.overlap.step_s * 1e3:,.1f} ms "
        f"of which {compiled.overlap.compute_s * 1e3:,.1f} compute; {compiled.temporaries / 1e9:.1f} GB of temporaries"
        for name, compiled in done.items()
    ]
    return "\n".join([first, f"modelled: {_machine()}", "", *lines, "", *ends])


def _machine() -> str:
    return (
        f"{H100.name}, matmuls {H100.flops_per_s / 1e12:.0f} TFLOP/s, memory {H100.bytes_per_s / 1e12:.2f} TB/s, links "
        f"{H100.node_bytes_per_s / 1e9:.0f} GB/s a GPU inside a node and {H100.network_bytes_per_s / 1e9:.0f} GB/s a "
        f"node outside, {H100.latency_s * 1e6:.0f} us a collective"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
