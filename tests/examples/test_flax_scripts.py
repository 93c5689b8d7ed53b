"""The Flax scripts run, plain and sharded, and learn the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def losses(name: str, *flags: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), "--steps", "20", *flags],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        # With dropout: masks are the same. tests/tensor/test_parallelize.py trains the scripts' models in one process.
        pytest.param("flax_script.py", ("--grid.z", "2", "--grid.y", "2", "--grid.x", "2"), marks=pytest.mark.slow),
        pytest.param("vit.py", ("--grid.data", "2", "--grid.y", "2", "--grid.x", "2"), marks=pytest.mark.slow),
        pytest.param("cnn.py", ("--grid.data", "2", "--grid.z", "2", "--grid.x", "2"), marks=pytest.mark.slow),
    ],
)
def test_the_sharded_script_prints_the_plain_ones_losses(name, flags):
    plain, sharded = losses(name), losses(name, *flags)
    assert len(plain) == 3
    assert plain[-1] < plain[0]
    # Printed to 1e-4; Adam feeds on rounding for 20 steps (see tests/tensor/test_parallelize.py).
    assert sharded == pytest.approx(plain, rel=1e-3, abs=1e-4)
