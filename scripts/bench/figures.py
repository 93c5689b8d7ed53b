"""Figures of a benchmark: the flags that ask for them, medians, the machine they are of, and how they are printed."""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from axonn_jax.cli.arguments import parse
from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.terminal import table
from axonn_jax.version import __version__

T = TypeVar("T")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "mpi4py", "mpi4jax", "orbax-checkpoint")
"""What a figure may depend on."""


def flags(doc: str, *given: str, **defaults: Any) -> argparse.Namespace:
    """Parses the command line: words, a flag for each default, and `--json`; the script's text is the help.

    A default of False makes a switch, a tuple a flag with several values; a type stands for a value without a default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in given:
        parser.add_argument(name)
    for name, default in {**defaults, "json": False}.items():
        more: dict[str, Any] = {"action": "store_true"} if default is False else {"type": default}
        if default is not False and not isinstance(default, type):
            first = default[0] if isinstance(default, tuple) else default
            more = {"type": type(first), "default": default, "help": f"(default {default})"}
            more |= {"nargs": "+"} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)
    found = parser.parse_args()
    for name in ("rounds", "seeds"):
        if defaults.get(name) and getattr(found, name) < 1:
            parser.error(f"--{name}: at least 1")
    return found


def command(kind: type[T], run: Callable[[T], int]) -> NoReturn:
    """Runs a benchmark with the flags of a dataclass and ends the process; an error is one line, as of `axonn-jax`."""
    from axonn_jax.cli.main import report as report_error

    try:
        status = run(parse(kind, sys.argv[1:], f"scripts/bench/{Path(sys.argv[0]).name}"))
    except SystemExit:
        raise
    except BaseException as error:
        status = report_error(error)
    sys.exit(status)


def versions(*packages: str) -> dict[str, str]:
    """The versions of this package and of those of `packages` that are installed."""
    installed = {"axonn_jax": __version__}
    for name in packages or PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> str:
    """The processor and its number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{platform.machine()}, {os.cpu_count()} cores: {name}"


def show(figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints figures: a JSON object with machine and versions, or a table for each list of rows and a line a number.

    What is neither a number, a text nor rows of them is in the JSON alone.
    """
    if as_json:
        print(json.dumps({**figures, "device": machine(), "versions": versions()}))
        return
    for name, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            heads = [key for key, cell in value[0].items() if _plain(cell)]
            left = [at for at, key in enumerate(heads) if isinstance(value[0][key], str)]
            print(*table(heads, [[_cell(row[key]) for key in heads] for row in value], left), sep="\n")
        elif isinstance(value, dict) and all(map(_plain, value.values())):
            for key, cell in value.items():
                print(f"{name}, {key:44} {_cell(cell)}" if name not in ("ratios", "raw") else f"{key:52} {_cell(cell)}")
        elif _plain(value):
            print(f"{name:52} {_cell(value)}")


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def report(ratios: Mapping[str, float], raw: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints the ratios of a race and what they are made of; of one alone the JSON has `ratio` too."""
    headline = {"ratio": next(iter(ratios.values()))} if len(ratios) == 1 else {}
    show({**headline, "ratios": ratios, **raw} if as_json else {"raw": raw, "ratios": ratios}, as_json=as_json)


def over(times: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of each round: whatever slowed a round met both."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of a page."""
    return ["|" + "|".join(cells) + "|" for cells in (heads, ["---"] * len(heads), *rows)]


def chosen(flag: str, names: tuple[str, ...], known: Any) -> tuple[str, ...]:
    """The names, if all are known.

    Raises:
        UserError: one is not.
    """
    for name in names:
        if name not in known:
            raise UserError(flag, name, f"one of {', '.join(map(repr, known))}{nearest(name, known)}")
    return names
