"""`axonn-jax inspect RUN_DIR`: the checkpoints of a run: steps, grids, sizes, and whether they are sound."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from axonn_jax.errors import UserError
from axonn_jax.state.files import listed, verify
from axonn_jax.state.manifest import Damaged, all_steps, read, step_of
from axonn_jax.terminal import printable


@dataclass(frozen=True)
class Inspect:
    """List the checkpoints of a run directory, newest first, and check every file of them."""

    run_dir: Annotated[Positional[Path], arg(metavar="RUN_DIR")]
    """A directory left by `axonn-jax train`, its checkpoints/, or one step_N."""
    fast: bool = False
    """Look at names and sizes only, without reading every file for its checksum."""
    json: bool = False
    """Print one JSON object."""


def run(args: Inspect) -> int:
    """Prints the list; 1 where no checkpoint is sound.

    Raises:
        UserError: the directory holds no checkpoints.
    """
    inside = args.run_dir / "checkpoints"
    folder = inside if inside.is_dir() else args.run_dir
    paths = [folder] if step_of(folder) is not None and folder.is_dir() else all_steps(folder)
    if not paths:
        raise UserError("RUN_DIR", str(args.run_dir), "a directory left by `axonn-jax train`, with checkpoints/step_N")
    rows = [_row(path, args.fast) for path in paths]
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith(("unfinished_", "removed_", "aside_")))
    if args.json:
        print(json.dumps({"directory": str(folder), "checkpoints": rows, "other": left}))
    else:
        print(f"{'step':>10}  {'size':>10}  {'saved (UTC)':19}  {'age':>8}  {'proc.':>5}  grid, state")
        for row in rows:
            print(printable(_line(row)))
        if left:
            print(printable(f"other directories: {', '.join(left)}"))
    return 0 if any(row["valid"] for row in rows) else 1


def _row(path: Path, fast: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step_of(path), "path": str(path), "valid": False, "checked": not fast}
    try:
        manifest = read(path)
    except Damaged as fault:
        return {**row, "fault": str(fault)}
    wrong = verify(path, manifest, fast=fast)
    row |= {
        "grid": manifest.grid,
        "processes": manifest.processes,
        "bytes": manifest.bytes,
        "arrays": len(manifest.arrays),
        "saved": manifest.saved,
        "position": manifest.run.get("position"),
        "versions": dict(manifest.versions),
    }
    return row | ({"fault": listed(wrong)} if wrong else {"valid": True})


def _line(row: dict[str, Any]) -> str:
    if "bytes" not in row:
        return f"{row['step']:>10}  {'-':>10}  {'-':19}  {'-':>8}  {'-':>5}  DAMAGED: {row['fault']}"
    saved = datetime.fromisoformat(row["saved"]).astimezone(UTC)
    age = _age((datetime.now(UTC) - saved).total_seconds())
    sound = "not checked" if not row["checked"] else "sound"
    state = sound if row["valid"] else f"DAMAGED: {row['fault']}"
    return (
        f"{row['step']:>10}  {_size(row['bytes']):>10}  {saved:%Y-%m-%d %H:%M:%S}  {age:>8}  {row['processes']:>5}  "
        f"{row['grid'][:80]}, {state}"
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _age(seconds: float) -> str:
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
