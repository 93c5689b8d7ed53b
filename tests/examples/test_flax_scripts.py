"""The scripts of examples and pages run, plain and sharded, and give the same."""

import ast
import re
import sys
from pathlib import Path

import grids
import jax
import numpy as np
import plain
import pretrained
import pytest
import texts
from launched import ROOT, succeeded
from tokenizers import Tokenizer

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.data.prepare import prepare


def losses(name: str, *flags: str) -> list[float]:
    done = succeeded([sys.executable, ROOT / "examples" / name, "--steps", "20", *flags])
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        # With dropout: masks are the same. test_parallelize.py trains the scripts' models in one process.
        pytest.param("flax_script.py", ("--grid.z", "2", "--grid.y", "2", "--grid.x", "2"), marks=pytest.mark.slow),
        pytest.param("vit.py", ("--grid.data", "2", "--grid.y", "2", "--grid.x", "2"), marks=pytest.mark.slow),
        pytest.param("cnn.py", ("--grid.data", "2", "--grid.z", "2", "--grid.x", "2"), marks=pytest.mark.slow),
        pytest.param("pipeline.py", ("--grid.pipe", "2", "--grid.y", "2"), marks=pytest.mark.slow),
    ],
)
def test_the_sharded_script_prints_the_plain_ones_losses(name, flags):
    plain, sharded = losses(name), losses(name, *flags)
    assert len(plain) == 3
    assert plain[-1] < plain[0]
    # Printed to 1e-4; Adam feeds on rounding for 20 steps (see test_parallelize.py).
    assert sharded == pytest.approx(plain, rel=1e-3, abs=1e-4)


LLAMA = pretrained.CONFIGS["llama"] | {"vocab_size": 512}
PROMPTS = ("def main(args):", "import jax")


def printed(run_dir: Path, *flags: str) -> list[str]:
    done = succeeded([sys.executable, ROOT / "examples/generate.py", run_dir, *PROMPTS, *flags])
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


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    prepare(texts.write(tmp_path / "source", files=48, words=8000), tmp_path / "text", vocab=4096, include=["*.py"])
    done = succeeded([sys.executable, ROOT / "examples/library.py", tmp_path / "text", "10"], 300, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_repeated_passages_are_memorised_without_the_goldfish_loss_only(tmp_path):
    picture = tmp_path / "goldfish.png"
    done = succeeded([sys.executable, ROOT / "examples/goldfish.py", "300", picture], 900, tmp_path)
    last = {int(k): float(share) for k, share in re.findall(r"k (\d+) .* memorised ([\d.]+)", done.stdout)}
    assert last[0] >= 0.75
    assert last[2] == last[4] == 0.0
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left open"])
def test_the_page_pipelines_plain_flax_layers(closed):
    """A script that forgets `close` ends in order too: a thread left in jax would abort the process."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pipeline.md").read_text(), re.S)[-1]
    assert "trainer.close()" in code
    code = code if closed else code.replace("trainer.close()", "")
    done = succeeded([sys.executable, "-c", code], 300)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line[0].isdecimal()]
    assert len(losses) == 20
    assert losses[-1] < 0.1 < losses[0]
