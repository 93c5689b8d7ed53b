"""scripts/bench/schedules: small sizes, both outputs, bad input."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench" / "schedules"


def run(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, cwd=cwd, timeout=120
    )


def test_json(tmp_path):
    done = run("--sizes", "2x4x1", "2x4x2", "--seeds", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ratios"]["2x4x1, even: message"] <= result["ratios"]["2x4x1, even: zero-bubble"]
    assert result["ratios"]["2x4x1, even: 1f1b"] == 1.25
    assert min(result["ratios"].values()) >= 1.0
    assert len(result["ratios"]) == len(result["rows"]) == 2 * 6 * 7
    assert {"versions", "device", "seeds"} <= set(result)


def test_table(tmp_path):
    done = run("--sizes", "3x4x1", "--seeds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "message, fused" in done.stdout


def test_a_size_that_is_none_is_refused(tmp_path):
    done = run("--sizes", "3x0x1", cwd=tmp_path)
    assert done.returncode == 1
    assert "'3x0x1' is not PIPExMICROBATCHESxVIRTUAL" in done.stderr
