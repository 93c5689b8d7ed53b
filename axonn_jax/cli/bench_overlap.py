"""``axonn-jax bench overlap``: what runs beside a step's collectives in the schedule that XLA makes for a GPU."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata, resources
from typing import Annotated, Any

from tyro.conf import arg

from axonn_jax.errors import UserError
from axonn_jax.grid import MESH_AXES, GridShape
from axonn_jax.models.inner import InnerFeatures, choose_inner
from axonn_jax.models.presets import preset
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.communication import Recompute
from axonn_jax.planner.overlap import MAIN, Share, measure, share, shares
from axonn_jax.planner.overlap import Overlap as Measured
from axonn_jax.planner.roofline import H100
from axonn_jax.version import __version__

_NODE = H100.node_devices


@dataclass(frozen=True)
class Overlap:
    """Compile a training step in bf16 for H100 GPUs, none of which is needed, and examine the schedule.

    For every class of collectives: the share of bytes with a matmul between start and done, and the share of modelled
    time that the device computes meanwhile, with the package's overlap on and off and by automatic partitioning. Needs
    the package's extra `aot`.
    """

    model: str = "gpt-5b"
    """Name of a published model (docs/config.md lists them)."""
    layers: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the model's)")] = None
    """Number of blocks: fewer compile faster."""
    devices: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the grid's product)")] = None
    """Number of GPUs, a multiple of 8; what the grid's axes leave of them goes to grid.data."""
    grid: GridShape = field(default_factory=lambda: GridShape(data=2, z=4, y=2, x=2))
    """How the GPUs are arranged."""
    rows: int = 4
    """Sequences of a microbatch on a device."""
    microbatches: int = 2
    """Parts a step's batch is processed in."""
    activations: Recompute = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)."""
    inner_features: InnerFeatures = "y"
    """What splits the features inside the package's blocks (train.inner_features): y, yx or auto."""
    streams: int = 2
    """Parts of a microbatch's rows that run side by side, as overlap.streams; a divisor of rows."""
    order: bool = True
    """Whether the package orders the computation, as overlap.order."""
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
    layout = _layout(args)
    _check(args, shape, layout)
    programs = {"on": _Program(args.streams, args.order)}
    if args.off:
        programs["off"] = _Program()
    if args.automatic:
        programs["automatic"] = _Program(automatic=True)
    done = {name: _compiled(args, shape, layout, program) for name, program in programs.items()}
    print(json.dumps(_figures(args, shape, layout, done)) if args.json else _table(args, shape, layout, done))
    return 0


def _layout(args: Overlap) -> GridShape:
    grid = args.grid
    if args.devices is not None and args.devices != grid.devices:
        if args.devices < 1 or args.devices % grid.devices:
            raise UserError("--devices", args.devices, f"a multiple of the grid's product, which is {grid.devices}")
        grid = replace(grid, data=grid.data * args.devices // grid.devices)
    return grid


def _check(args: Overlap, shape: ModelShape, layout: GridShape) -> None:
    """What would otherwise fail later, or in words that do not name a flag."""
    if layout.pipe != 1:
        raise UserError("grid.pipe", layout.pipe, "1: this examines one stage's step")
    if layout.devices % _NODE:
        raise UserError("--devices", layout.devices, f"a multiple of {_NODE}, the GPUs of a node")
    for name in ("rows", "streams", "microbatches"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}", getattr(args, name), "an integer of at least 1")
    if args.rows % args.streams:
        raise UserError("--streams", args.streams, f"a divisor of --rows, which is {args.rows}")
    layout.check_model(shape)
    choose_inner(args.inner_features, shape, layout, args.activations)


@dataclass(frozen=True)
class _Program:
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

    program: _Program
    overlap: Measured
    temporaries: int
    """Bytes a device needs beside parameters and optimizer state."""


def _compiled(args: Overlap, shape: ModelShape, layout: GridShape, program: _Program) -> _Done:
    compiled = _compile(args, shape, layout, program)
    text = compiled.as_text()
    assert text is not None  # XLA's backends print their programs
    axes = {axis: int(getattr(layout, axis)) for axis in MESH_AXES}
    memory: Any = compiled.memory_analysis()
    return _Done(program, measure(text, axes, H100), int(memory.temp_size_in_bytes))


def _compile(args: Overlap, shape: ModelShape, layout: GridShape, program: _Program) -> Any:
    import jax
    import optax

    from axonn_jax import compat
    from axonn_jax.grid import build_grid
    from axonn_jax.train.automatic import compile_automatic
    from axonn_jax.train.step import compile_abstract

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
        "precision": "bf16",
        "activations": args.activations,
        "attention": "xla",  # the fused kernel cannot be compiled without cuDNN
    }
    where = (shape, build_grid(layout, devices), optax.adamw(1e-3))
    if program.automatic:
        return compile_automatic(*where, **step)
    inner = choose_inner(args.inner_features, shape, layout, args.activations)
    return compile_abstract(*where, **step, streams=program.streams, ordered=program.ordered, inner=inner)


def _figures(args: Overlap, shape: ModelShape, layout: GridShape, done: dict[str, _Done]) -> dict[str, Any]:
    def row(one: Share) -> dict[str, Any]:
        return {**asdict(one), "of_bytes": one.of_bytes, "of_time": one.of_time}

    def program(one: _Done) -> dict[str, Any]:
        classes = {kind: row(found) for kind, found in shares(one.overlap.windows).items()}
        return {
            **asdict(one.program),
            "classes": classes,
            "all": row(share(one.overlap.windows)),
            "compute_s": one.overlap.compute_s,
            "step_s": one.overlap.step_s,
            "temporary_bytes": one.temporaries,
        }

    ratios = {
        name: {
            kind: {"bytes": found.of_bytes, "time": found.of_time}
            for kind, found in shares(one.overlap.windows).items()
            if kind in MAIN
        }
        for name, one in done.items()
    }
    packages = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return {
        "ratios": ratios,
        "programs": {name: program(one) for name, one in done.items()},
        "model": args.model,
        "layers": shape.layers,
        "grid": asdict(layout),
        "devices": layout.devices,
        "rows": args.rows,
        "microbatches": args.microbatches,
        "activations": args.activations,
        "inner": asdict(choose_inner(args.inner_features, shape, layout, args.activations)),
        "dtype": "bfloat16",
        "machine": asdict(H100),
        "versions": {"axonn_jax": __version__, **_versions(packages)},
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _table(args: Overlap, shape: ModelShape, layout: GridShape, done: dict[str, _Done]) -> str:
    heads = ("program", "collectives", "MB a step", "beside a matmul", "ms", "time hidden")
    rows = []
    for name, one in done.items():
        windows = one.overlap.windows
        sums: dict[str, Share] = {str(kind): found for kind, found in shares(windows).items()}
        sums["the four together"] = share(w for w in windows if w.kind in MAIN)
        sums["all together"] = share(windows)
        for kind, found in sums.items():
            sizes = (f"{found.bytes / 1e6:,.1f}", _percent(found.of_bytes))
            rows.append((name, kind, *sizes, f"{found.seconds * 1e3:,.2f}", _percent(found.of_time)))
    widths = [max(len(one[at]) for one in (heads, *rows)) for at in range(len(heads))]
    lines = [
        "  ".join(f"{cell:{width}}" if at < 2 else f"{cell:>{width}}" for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(one, widths, strict=True)) for one in (heads, *rows))
    ]
    first = (
        f"{args.model}, {shape.layers} layers, grid {layout}, {args.rows} rows x {args.microbatches} microbatches, "
        f"activations {args.activations}, bf16"
    )
    ends = [
        f"{name}: {one.program}; modelled step {one.overlap.step_s * 1e3:,.1f} ms "
        f"of which {one.overlap.compute_s * 1e3:,.1f} compute; {one.temporaries / 1e9:.1f} GB of temporaries"
        for name, one in done.items()
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
