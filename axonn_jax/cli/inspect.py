"""``axonn-jax inspect``: checkpoints of a run with their steps, grids, sizes and faults."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from axonn_jax.cli.arguments import Arg
from axonn_jax.core.checkpoint.manifest import CorruptCheckpoint, all_steps, file_faults, read, step_of
from axonn_jax.core.errors import UserError, first_of
from axonn_jax.core.terminal import age, printable, size, table


@dataclass(frozen=True)
class Inspect:
    """List the checkpoints of a run directory, newest first, and check every file."""

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train`, checkpoints/ in it, or one step_N."""
    fast: bool = False
    """Check names and sizes only, without reading files for checksums."""
    json: bool = False
    """Print one JSON object."""


def run(args: Inspect) -> int:
    """Print the checkpoints; the exit status is 1 if none is sound.

    Raises:
        UserError: The directory holds no checkpoints.
    """
    inside = args.run_dir / "checkpoints"
    folder = inside if inside.is_dir() else args.run_dir
    paths = [folder] if step_of(folder) is not None and folder.is_dir() else all_steps(folder)
    if not paths:
        accepted = "an existing directory left by `axonn-jax train`, with checkpoints/step_N"
        raise UserError("RUN_DIR", str(args.run_dir), accepted)
    rows = [_row(path, args.fast) for path in paths]
    leftovers = sorted(p.name for p in folder.iterdir() if p.name.startswith(("unfinished_", "removed_", "aside_")))
    if args.json:
        print(json.dumps({"directory": str(folder), "checkpoints": rows, "other": leftovers}))
    else:
        heads = ("step", "size", "saved (UTC)", "age", "proc.", "grid, state")
        print("\n".join(table(heads, list(map(_cells, rows)), left=(2, 5))))
        if leftovers:
            print(printable(f"other directories: {', '.join(leftovers)}"))
    return 0 if any(row["valid"] for row in rows) else 1


def _row(path: Path, fast: bool) -> dict[str, object]:
    row: dict[str, object] = {"step": step_of(path), "path": str(path), "valid": False, "checked": not fast}
    try:
        manifest = read(path)
    except CorruptCheckpoint as fault:
        return {**row, "fault": str(fault)}
    faults = file_faults(path, manifest, fast=fast)
    row |= {
        "grid": manifest.grid,
        "processes": manifest.processes,
        "bytes": manifest.bytes,
        "arrays": len(manifest.arrays),
        "saved": manifest.saved,
        "position": manifest.run.get("position"),
        "versions": dict(manifest.versions),
    }
    return row | ({"fault": first_of(faults, "; ")} if faults else {"valid": True})


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "bytes" not in row:
        return (str(row["step"]), "-", "-", "-", "-", printable(f"DAMAGED: {row['fault']}"))
    saved = datetime.fromisoformat(row["saved"]).astimezone(UTC)
    state = f"DAMAGED: {row['fault']}" if not row["valid"] else "sound" if row["checked"] else "not checked"
    return (
        str(row["step"]),
        size(row["bytes"]),
        f"{saved:%Y-%m-%d %H:%M:%S}",
        age((datetime.now(UTC) - saved).total_seconds()),
        str(row["processes"]),
        printable(f"{row['grid'][:80]}, {state}"),
    )
