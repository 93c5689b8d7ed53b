"""Rows of results: what a worker sends, what is printed, what goes into the JSON file."""

import json
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped", "does not fit"]

MARK = "\x1erow "
"""Starts a line of a worker's standard output that is a row; libraries print the other lines."""

SECTIONS = {
    "device": "device and versions",
    "parity": "parity: this package on the device against the CPU",
    "matmul": "matmul ceiling: bf16, many dependent products in one program",
    "training": "training throughput: bf16, AdamW, clipping",
    "torch": "the same model in PyTorch: autocast bf16, fused AdamW, clipping",
    "offload": "optimizer state on the host: bf16, AdamW, 8 microbatches",
    "program": "where it goes: the compiled steps",
}

COLUMNS = (
    f"{'step s':>8} {'tokens/s':>10} {'MFU %':>6} {'HFU %':>6} {'of ceiling %':>12} {'peak GB':>8} {'compile s':>9}"
)


@dataclass
class Row:
    """One line of a section."""

    section: str
    name: str
    status: Status
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def line(self) -> str:
        """The row as one line of a plain-text table."""
        return f"  {self.name:<34} {self.status:<12} {self.note}".rstrip()


Emit = Callable[[Row], None]


class Skip(Exception):
    """Raised by a check that does not apply here; its text says why."""


def header(section: str) -> str:
    """Title of a section, with the columns where its rows are a table."""
    title = f"\n== {SECTIONS[section]}"
    return title + (f"\n  {'':<34} {'':<12} {COLUMNS}" if section in ("training", "torch") else "")


def first_line(error: BaseException) -> str:
    """An error as one line: its type and the first line of its text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no text)'}"[:400]


def out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory ran out (and not, say, a kernel's shared memory)."""
    text = str(error).lower()
    return "out of memory" in text or ("resource_exhausted" in text and "shared memory" not in text)


def attempt(emit: Emit, section: str, name: str, check: Callable[[], Row]) -> Row:
    """Runs one check and sends its row; whatever it raises becomes a row too, so that the others go on."""
    began = time.monotonic()
    try:
        row = check()
    except Skip as reason:
        row = Row(section, name, "skipped", str(reason))
    except Exception as error:
        if out_of_memory(error):
            row = Row(section, name, "does not fit", first_line(error))
        else:
            trace = traceback.format_exc().splitlines()[-12:]
            row = Row(section, name, "failed", first_line(error), {"traceback": trace})
    row.seconds = round(time.monotonic() - began, 2)
    emit(row)
    return row


def to_stdout(row: Row) -> None:
    """Sends a row to the process that started this worker."""
    print(MARK + json.dumps(asdict(row)), flush=True)


def from_line(line: str) -> Row | None:
    """The row that a line of a worker's output holds, if it holds one."""
    return Row(**json.loads(line.removeprefix(MARK))) if line.startswith(MARK) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the file whole: a run that is cut off leaves the last complete version."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(_plain(content), indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity; null stands for both."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None, width: int, digits: int, scale: float = 1.0) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * scale:>{width},.{digits}f}"


def throughput_note(figures: dict[str, Any]) -> str:
    """Figures of a training row under `COLUMNS`."""
    return " ".join(
        (
            _number(figures["step_s"], 8, 4),
            _number(figures["tokens_per_s"], 10, 0),
            _number(figures["mfu"], 6, 1, 100),
            _number(figures["hfu"], 6, 1, 100),
            _number(figures["of_ceiling"], 12, 1, 100),
            _number(figures["peak_bytes"], 8, 1, 1e-9),
            _number(figures["compile_s"], 9, 1),
        )
    )
