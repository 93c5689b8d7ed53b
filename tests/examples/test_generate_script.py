"""The script that generates prints the same texts on every grid, and the plain model's scores."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import grids
import jax
import numpy as np
import plain
import pretrained
import pytest
from tokenizers import Tokenizer

import axonn_jax as ax
from axonn_jax.data.prepare import prepare
from axonn_jax.grid import GridShape
from axonn_jax.tensor.params import split_module

ROOT = Path(__file__).resolve().parents[2]
LLAMA = pretrained.CONFIGS["llama"] | {"vocab_size": 512}
PROMPTS = ("def main(args):", "import jax")


def printed(run_dir: Path, *flags: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/generate.py"), str(run_dir), *PROMPTS, *flags],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_sharded_script_prints_the_plain_ones_texts_and_scores(tmp_path):
    prepare(ROOT / "axonn_jax", tmp_path / "text", vocab=512, include=["cli/*.py"])
    run_dir = pretrained.write_model(tmp_path / "model", LLAMA, pretrained.weights(LLAMA))
    (tmp_path / "text/tokenizer.json").rename(run_dir / "tokenizer.json")
    lines = printed(run_dir)
    assert printed(run_dir, "--grid.y", "2") == lines
    assert [ast.literal_eval(text).startswith(PROMPTS[at // 2]) for at, text in enumerate(lines[:4])] == [True] * 4
    assert len(set(lines[:4])) == 4

    shown, tokens = re.match(r"([\d.]+) nats a token over (\d+) tokens", lines[4]).groups()
    ids = Tokenizer.from_file(str(run_dir / "tokenizer.json")).encode(PROMPTS[0]).ids
    model = ax.models.from_pretrained(run_dir, grids.lay(GridShape()))
    params = {name: np.asarray(value, np.float64) for name, value in split_module(model).params.items()}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        expected = jax.jit(lambda: plain.loss(params, model.shape, np.array([ids])))()
    assert int(tokens) == len(ids) - 1
    assert float(shown) == pytest.approx(float(expected), abs=2e-4)  # printed to 1e-4
