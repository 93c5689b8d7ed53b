"""``axonn-jax bench matmuls``: the rate of a model's matmuls in every layout, and which one is chosen."""

import json
from dataclasses import asdict, dataclass, field
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING, Any

from axonn_jax.cli.bench_compile import SMALL, SMALL_ROWS
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.memory.host import keep_freed_memory
from axonn_jax.models.presets import preset
from axonn_jax.train.config import Precision
from axonn_jax.version import __version__

if TYPE_CHECKING:
    from axonn_jax.tuning import Measured


@dataclass(frozen=True)
class Matmuls:
    """Time every distinct matmul with a weight of a transformer's step on one device, in every layout, in turns.

    For each of forward, dX and dW: as written, with either operand or both copied into the other orientation first, and
    each of these as the transposed product. The ratio is the time of all of them as written over that of what is
    chosen; in a step, where a copy may be part of other work, it can be another. Nothing else should run meanwhile.
    """

    model: str = ""
    """Name of a published model (docs/config.md lists them). Left out: width 256, vocabulary 4,096, sequence 256."""
    grid: GridShape = field(default_factory=GridShape)
    """Whose local matmuls: only the sizes matter, one device is used."""
    rows: int = SMALL_ROWS
    """Sequences of a microbatch on a device (with overlap.streams of one stream)."""
    precision: Precision = "auto"
    """What layers compute in; auto: bf16 on accelerators, fp32 on CPU."""
    rounds: int = 7
    """Times everything is timed."""
    keep: bool = False
    """Keep what was chosen for training runs with train.matmul_layouts = "auto"."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Matmuls) -> int:
    """Measures and prints.

    Raises:
        UserError: the model is unknown, or model and grid do not fit.
    """
    shape = preset(args.model) if args.model else SMALL
    args.grid.check_model(shape)
    for name in ("rows", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}", getattr(args, name), "an integer of at least 1")
    keep_freed_memory()  # as a training run does
    import jax

    from axonn_jax.memory.precision import precisions
    from axonn_jax.models.matmuls import local_products
    from axonn_jax.tuned import cache_file, save
    from axonn_jax.tuning import measure

    dtype = precisions(args.precision).compute.name
    times = local_products(shape, args.grid, args.rows * shape.seq_len, dtype)
    device = jax.local_devices()[0]
    found = measure(times, device, rounds=args.rounds)
    kept = (save(cache_file(), device, found) or f"kept in {cache_file()}") if args.keep else ""
    written, chosen = (sum(times[one.product] * _seconds(one, best) for one in found) for best in (False, True))
    rows = [_row(one, times[one.product]) for one in found]
    figures = {
        "ratio": written / chosen,
        "rows": rows,
        "seconds": {"as written": written, "chosen": chosen},
        "kept": kept,
        "model": asdict(shape),
        "grid": asdict(args.grid),
        "tokens": args.rows * shape.seq_len,
        "dtype": dtype,
        "device": device.device_kind,
        "versions": {"axonn_jax": __version__, **{name: metadata.version(name) for name in ("jax", "jaxlib")}},
    }
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _seconds(one: "Measured", best: bool) -> float:
    from axonn_jax.tensor.matmul import AS_WRITTEN

    return median(one.seconds[one.best if best else AS_WRITTEN])


def _row(one: "Measured", times: int) -> dict[str, Any]:
    product = one.product
    return {
        "product": str(product),
        "times": times,
        "stored": product.stored,
        "sizes": [product.m, product.k, product.n],
        "chosen": str(one.best),
        "ratio": one.gain(one.best),
        "gflop_per_s": {str(form): one.rate(form) / 1e9 for form in one.seconds},
        "gain": {str(form): one.gain(form) for form in one.seconds},
    }


def _table(figures: dict[str, Any]) -> str:
    heads = ("product (m x k x n)", "times", "as written, GFLOP/s", "chosen, GFLOP/s", "faster", "chosen")
    cells = [
        (
            row["product"],
            str(row["times"]),
            f"{row['gflop_per_s']['as written']:,.0f}",
            f"{row['gflop_per_s'][row['chosen']]:,.0f}",
            f"{row['ratio']:.2f}",
            row["chosen"],
        )
        for row in figures["rows"]
    ]
    widths = [max(len(row[at]) for row in (heads, *cells)) for at in range(len(heads))]
    lines = [
        "  ".join(f"{cell:{'<' if at in (0, 5) else '>'}{widths[at]}}" for at, cell in enumerate(row)).rstrip()
        for row in (heads, *cells)
    ]
    seconds = figures["seconds"]
    last = (
        f"all of a microbatch on {figures['device']}: {1e3 * seconds['as written']:.1f} ms as written, "
        f"{1e3 * seconds['chosen']:.1f} ms as chosen, ratio {figures['ratio']:.2f}"
    )
    return "\n".join([*lines, "", last, *([figures["kept"]] if figures["kept"] else [])])
