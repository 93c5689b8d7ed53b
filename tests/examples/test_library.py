"""The examples train; so does the pipeline of plain Flax layers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import texts

from axonn_jax.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    prepare(texts.write(tmp_path / "source", files=48, words=8000), tmp_path / "text", vocab=4096, include=["*.py"])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "library.py"), str(tmp_path / "text"), "10"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_repeated_passages_are_memorised_without_the_goldfish_loss_only(tmp_path):
    picture = tmp_path / "goldfish.png"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "goldfish.py"), "300", str(picture)],
        capture_output=True,
        text=True,
        check=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
    )
    last = {int(k): float(share) for k, share in re.findall(r"k (\d+) .* memorised ([\d.]+)", done.stdout)}
    assert last[0] >= 0.75
    assert last[2] == last[4] == 0.0
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left open"])
def test_the_page_pipelines_plain_flax_layers(closed):
    """A script that forgets `close` ends in order too: a thread left in jax would abort the process."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/pipeline.md").read_text(), re.S)[1]
    assert "trainer.close()" in code
    code = code if closed else code.replace("trainer.close()", "")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line[0].isdecimal()]
    assert len(losses) == 20
    assert losses[-1] < 0.1 < losses[0]
