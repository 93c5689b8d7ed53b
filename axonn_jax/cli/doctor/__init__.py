"""``axonn-jax doctor``: checks of installed packages, MPI and devices, and commands that fix faults."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from axonn_jax.core.terminal import Ticker, columns, redraws, wrapped
from axonn_jax.version import __version__

if TYPE_CHECKING:
    from axonn_jax.cli.doctor.probes import Row


@dataclass(frozen=True)
class Doctor:
    """Check installed packages, MPI and devices; list faults and commands to mend faults.

    The exit status is 1 if something essential is missing, otherwise 0.
    """

    timeout: float = 60.0
    """Seconds to wait for an import, for the devices or for two MPI ranks."""

    json: bool = False
    """Print one JSON object with all findings, and nothing else, on standard output."""


def run(args: Doctor) -> int:
    """Run all checks, print the findings and return the exit status.

    Raises:
        UserError: The time limit is not above 0.
    """
    from axonn_jax.core.errors import UserError

    if not args.timeout > 0:
        raise UserError("--timeout", args.timeout, "a number of seconds above 0")
    began = time.perf_counter()
    with Ticker("looking around", first=0.1) if sys.stderr.isatty() else nullcontext():
        rows = examine(args.timeout)
    seconds = round(time.perf_counter() - began, 2)
    good = not any(row.broken for row in rows)
    # Under srun every task runs the command; only the first one prints.
    if os.environ.get("SLURM_STEP_ID") and os.environ.get("SLURM_PROCID", "0") != "0":
        return 0 if good else 1
    if args.json:
        report = {"ok": good, "version": __version__, "seconds": seconds, "rows": [asdict(row) for row in rows]}
        print(json.dumps(report))
    else:
        _show(rows)
    return 0 if good else 1


def examine(timeout: float) -> list["Row"]:
    """Run all checks concurrently, each in other processes, and return their rows in a fixed order."""
    from axonn_jax.cli.doctor import checks
    from axonn_jax.cli.doctor.mpi import mpi

    parts: list[Callable[[], Iterable[Row]]] = [
        checks.host,
        lambda: checks.packages(timeout),
        lambda: [checks.gpu_shares(timeout)],
        lambda: mpi(timeout),
        checks.places,
        lambda: [checks.slurm(os.environ)],
        checks.extras,
    ]
    with ThreadPoolExecutor(len(parts)) as pool:
        return [row for rows in pool.map(lambda part: list(part()), parts) for row in rows]


def _show(rows: list["Row"]) -> None:
    # Fixes are printed below the table, unwrapped, so that the commands can be copied.
    width, live = max(len(row.check) for row in rows), redraws(sys.stdout)
    colours = {"ok": 32, "warning": 33, "missing": 31} if live and not os.environ.get("NO_COLOR") else {}
    if live:
        print(f"axonn_jax {__version__}\n")
    for row in rows:
        status, found = f"{row.status:7}", row.found
        if row.status in colours:
            status = f"\x1b[{colours[row.status]}m{status}\x1b[0m"
        if live:
            found = f"\n{'':{width + 11}}".join(wrapped(found, columns() - width - 11))
        print(f"{row.check:{width}}  {status}  {found}")
    for row in rows:
        if row.status != "ok":
            print(f"\n{row.check}: {row.found}\n  would fail: {row.fails}\n  to fix it:  {row.fix}")
    wrong = [row.check for row in rows if row.broken]
    print(f"\nbroken: {', '.join(wrong)}" if wrong else "\neverything required is there")
