"""``axonn-jax bench matmuls``: the rate of a model's matmuls in every layout, and which one is chosen."""

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from axonn_jax.cli.bench.common import SMALL, SMALL_ROWS, versions
from axonn_jax.cli_args import Positive
from axonn_jax.distributed.cpu_allocator import keep_freed_memory
from axonn_jax.grid import GridShape
from axonn_jax.models.presets import preset
from axonn_jax.options import Precision
from axonn_jax.terminal import table

if TYPE_CHECKING:
    from axonn_jax.train.matmul_layouts import Measured


@dataclass(frozen=True)
class Matmuls:
    """Time every distinct matmul with a weight of a transformer's step on one device, in every layout, in turns.

    For each of forward, dX and dW: as written, with either operand or both copied into the other orientation first, and
    each of these as the transposed product. The ratio is the time of all of them as written over that of what is
    chosen; in a step, where a copy may be part of other work, it can be another. Nothing else should run meanwhile.
    """

    model: str = ""
    """Name of a published model (docs/train.md lists them). Left out: width 256, vocabulary 4,096, sequence 256."""
    grid: GridShape = field(default_factory=GridShape)
    """Whose local matmuls: only the sizes matter, one device is used."""
    rows: Positive = SMALL_ROWS
    """Sequences of a microbatch on a device, or of a part of them that runs beside the others."""
    precision: Precision = "auto"
    """What layers compute in; auto: bf16 on accelerators, fp32 on CPU."""
    rounds: Positive = 7
    """Times everything is timed."""
    keep: bool = False
    """Keep what was chosen for training runs with tensor.matmul_layouts = "auto"."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Matmuls) -> int:
    """Measures and prints.

    Raises:
        UserError: the model is unknown, or model and grid do not fit.
    """
    shape = preset(args.model) if args.model else SMALL
    shape.check_grid(args.grid)
    keep_freed_memory()  # as a training run does
    import jax

    from axonn_jax.memory.precision import precisions
    from axonn_jax.train.matmul_layouts import cache_file, local_products, measure, save

    dtype = precisions(args.precision).compute.name
    times = local_products(shape, args.grid, args.rows * shape.seq_len, dtype)
    device = jax.local_devices()[0]
    measured = measure(times, device, rounds=args.rounds)
    kept = (save(cache_file(), device, measured) or f"kept in {cache_file()}") if args.keep else ""
    written, chosen = (
        sum(times[product.product] * _seconds(product, best) for product in measured) for best in (False, True)
    )
    rows = [_row(product, times[product.product]) for product in measured]
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
        "versions": versions("jax", "jaxlib"),
    }
    print(json.dumps(figures) if args.json else _table(figures))
    return 0


def _seconds(measured: "Measured", best: bool) -> float:
    from axonn_jax.tensor.matmul import AS_WRITTEN

    return median(measured.seconds[measured.best if best else AS_WRITTEN])


def _row(measured: "Measured", times: int) -> dict[str, Any]:
    product = measured.product
    return {
        "product": str(product),
        "times": times,
        "stored": product.stored,
        "sizes": [product.m, product.k, product.n],
        "chosen": str(measured.best),
        "ratio": measured.gain(measured.best),
        "gflop_per_s": {str(form): measured.rate(form) / 1e9 for form in measured.seconds},
        "gain": {str(form): measured.gain(form) for form in measured.seconds},
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
    lines = table(heads, cells, left=(0, 5))
    seconds = figures["seconds"]
    last = (
        f"all of a microbatch on {figures['device']}: {1e3 * seconds['as written']:.1f} ms as written, "
        f"{1e3 * seconds['chosen']:.1f} ms as chosen, ratio {figures['ratio']:.2f}"
    )
    return "\n".join([*lines, "", last, *([figures["kept"]] if figures["kept"] else [])])
