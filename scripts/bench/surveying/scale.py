"""Large scale: the planner's simulated rows beside published ones, from `scripts/bench/published`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "published"


def simulated() -> dict[str, Any]:
    """Every published row with its prediction, as `scripts/bench/published --json` prints them."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: scripts/bench/published ended with status {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
