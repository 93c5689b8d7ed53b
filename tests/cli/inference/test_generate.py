"""A short run leaves weights that `axonn-jax generate` continues a prompt with."""

import json
import shutil
import subprocess
import sys
from functools import partial

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import texts
from commands import answer, refusal

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.files.data.prepare import prepare
from axonn_jax.files.data.tokenize import load
from axonn_jax.text.inference.programs import logits
from axonn_jax.text.inference.weights import of_run

CONFIG = """
[model]
layers = 1
hidden = 32
heads = 2
seq_len = 32

[data]
path = "text"

[train]
steps = 30
global_batch = 8
lr = 1e-2

[log]
every = 10
"""


def run(*words, cwd):
    command = [sys.executable, "-m", "axonn_jax.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate")
    prepare(texts.write(folder / "source"), folder / "text", vocab=400, include=["*.py"])
    (folder / "tiny.toml").write_text(CONFIG)
    done = run("train", "tiny.toml", "--grid.z", "2", "--grid.x", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_run_directory_holds_what_it_should(trained):
    names = {path.name for path in (trained / "runs" / "tiny").iterdir()}
    small = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.toml", "memory.json", "metrics.jsonl", "tracked.json", "loss.png", "checkpoints"} | small
    records = [json.loads(line) for line in (trained / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [10, 20, 30, 30]
    assert set(records[0]) >= {"step", "loss", "tokens", "tokens_per_s", "step_s", "grad_norm", "lr"}
    assert records[0]["tokens"] == 10 * 8 * 32
    assert set(records[-1]) == {"step", "eval_loss", "unigram_entropy"}


def test_the_same_seed_gives_the_same_text_from_weights_of_another_grid(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    asked = ("generate", "runs/tiny", "--prompt", "import ", "--tokens", "20")
    first, second, other = (answer(capsys, *asked, *more) for more in ((), ("--grid.y", "2"), ("--seed", "1")))
    assert first == second
    assert (first["prompt"], first["sample"]) == ("import ", 0)
    assert len(first["text"]) > 10
    assert other["text"] != first["text"]


def test_the_likeliest_token_is_the_models(trained):
    """Greedy tokens equal argmax over the trained weights' logits, one by one."""
    run_dir, grid = trained / "runs" / "tiny", grids.lay(GridShape())
    ids = load(run_dir / "tokenizer.json").encode("def ").ids
    ((found,),) = ax.Generator(run_dir, grid).generate([ids], tokens=5, sampling=ax.Sampling(temperature=0))
    loaded = of_run(run_dir, grid, "float32")
    scores = jax.jit(partial(logits, loaded.parts, grid.mesh))(loaded.params, jnp.asarray([ids + found]))
    assert found == np.argmax(scores[0, len(ids) - 1 : -1], -1).tolist()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--prompt", "x"], "RUN_DIR = 'nowhere'"),
        (["runs/tiny", "--prompt", "x", "--tokens", "0"], "--tokens = 0"),
        (["runs/tiny", "--prompt", "x", "--temperature", "-1"], "--temperature = -1.0"),
        (["runs/tiny", "--prompt", "x", "--temperature", "nan"], "--temperature = nan"),
        (["runs/tiny", "--prompt", "x", "--seed", "-1"], "--seed = -1"),
    ],
)
def test_bad_input_is_one_line(words, message, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    assert refusal(capsys, "generate", *words).startswith(f"error: {message}")


def test_a_run_without_a_checkpoint_is_named(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "runs/tiny", "run", ignore=shutil.ignore_patterns("checkpoints"))
    line = refusal(capsys, "generate", "run", "--prompt", "x")
    assert line.startswith("error: RUN_DIR = 'run': a step_N, or a run directory whose checkpoints/ holds a complete")
