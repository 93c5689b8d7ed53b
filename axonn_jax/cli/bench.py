"""``axonn-jax bench NAME``: measurements that the package makes of itself, one module each."""

import importlib
from collections.abc import Sequence

from axonn_jax.cli.parse import parse
from axonn_jax.errors import UserError, nearest

PROG = "axonn-jax bench"

# name, (module, its dataclass of arguments beside `run`), what it shows
BENCHES = {
    "collectives": (
        "axonn_jax.cli.bench_collectives",
        "Collectives",
        "bytes every collective of a step moves: compiled beside predicted",
    ),
    "vs_gspmd": (
        "axonn_jax.cli.bench_vs_gspmd",
        "VsGspmd",
        "bytes and step time beside jax.jit's automatic partitioning, grid by grid",
    ),
    "compile": (
        "axonn_jax.cli.bench_compile",
        "Compile",
        "compile time, program size and memory as layers grow in number, scanned and unrolled",
    ),
    "memory": (
        "axonn_jax.cli.bench_memory",
        "Memory",
        "memory of a step under every activation policy, and what it costs in time",
    ),
    "matmuls": (
        "axonn_jax.cli.bench_matmuls",
        "Matmuls",
        "rates of a step's matmuls in every layout of their operands, and which one is chosen",
    ),
    "overlap": (
        "axonn_jax.cli.bench_overlap",
        "Overlap",
        "what runs beside a step's collectives in the schedule that XLA makes for a GPU",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that is named and returns its exit status.

    Raises:
        UserError: no known benchmark is named, or its arguments are wrong.
    """
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES))
        lines = [f"  {name:{width}}  {text}" for name, (_, _, text) in BENCHES.items()]
        print(
            "\n".join([f"usage: {PROG} NAME ...", "", "benchmarks:", *lines, "", f"{PROG} NAME --help: its options."])
        )
        return 0
    name, rest = argv[0], argv[1:]
    if name not in BENCHES:
        raise UserError("NAME", name, f"one of {', '.join(BENCHES)}{nearest(name, BENCHES)}")
    module_name, arguments, _ = BENCHES[name]
    module = importlib.import_module(module_name)
    return int(module.run(parse(getattr(module, arguments), rest, f"{PROG} {name}")))
