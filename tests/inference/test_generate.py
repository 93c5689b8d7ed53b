"""A short run leaves weights that `axonn-jax generate` continues a prompt with."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from axonn_jax.cli.main import main
from axonn_jax.data.prepare import prepare

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
    prepare(Path(sysconfig.get_paths()["stdlib"]), folder / "text", vocab=400, include=["json/*.py", "logging/*.py"])
    (folder / "tiny.toml").write_text(CONFIG)
    done = run("train", "tiny.toml", "--grid.z", "2", "--grid.x", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_run_directory_holds_what_it_should(trained):
    names = {path.name for path in (trained / "runs" / "tiny").iterdir()}
    assert names == {"config.toml", "memory.json", "metrics.jsonl", "loss.png", "tokenizer.json", "checkpoints"}
    records = [json.loads(line) for line in (trained / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [10, 20, 30, 30]
    assert set(records[0]) >= {"step", "loss", "tokens", "tokens_per_s", "step_s", "grad_norm", "lr"}
    assert records[0]["tokens"] == 10 * 8 * 32
    assert set(records[-1]) == {"step", "eval_loss", "unigram_entropy"}


def test_the_same_seed_gives_the_same_text_from_weights_of_another_grid(trained):
    words = ("generate", "runs/tiny", "--prompt", "import ", "--tokens", "40", "--json")
    first, second = run(*words, cwd=trained), run(*words, cwd=trained)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    answer = json.loads(first.stdout)
    assert answer["prompt"] == "import "
    assert len(answer["text"]) > 10
    other = json.loads(run(*words, "--seed", "1", cwd=trained).stdout)
    assert other["text"] != answer["text"]


def test_the_likeliest_token_is_the_models(trained, monkeypatch):
    """Greedy text equals argmax over the trained weights' logits, token by token."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import axonn_jax as ax
    from axonn_jax.data.tokenize import load
    from axonn_jax.grid import GridShape, build_grid
    from axonn_jax.inference.texts import Generator, logits
    from axonn_jax.models import Transformer
    from axonn_jax.tensor.params import split_module

    grid = build_grid(GridShape(), jax.devices()[:1])
    shape = ax.models.ModelShape(1, 32, 2, 2, 128, 400, 32)
    tokenizer = load(trained / "runs" / "tiny" / "tokenizer.json")
    generator = Generator(trained / "runs" / "tiny", shape, tokenizer, grid)
    text = "".join(generator.continue_prompt("def ", tokens=5, temperature=0, top_k=0, seed=0))
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0))))
    ids = list(tokenizer.encode("def ").ids)
    start = len(ids)
    for _ in range(5):
        scores = logits(parts, grid.mesh, generator.params, jnp.asarray([ids]))
        ids.append(int(np.argmax(scores[0, -1])))
    assert tokenizer.decode(ids[start:]) == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--prompt", "x"], "RUN_DIR = 'nowhere'"),
        (["runs/tiny", "--prompt", ""], "--prompt = ''"),
        (["runs/tiny", "--prompt", "x", "--tokens", "0"], "--tokens = 0"),
        (["runs/tiny", "--prompt", "x", "--temperature", "-1"], "--temperature = -1.0"),
        (["runs/tiny", "--prompt", "x", "--temperature", "nan"], "--temperature = nan"),
        (["runs/tiny", "--prompt", "x", "--seed", "-1"], "--seed = -1"),
    ],
)
def test_bad_input_is_one_line(words, message, trained, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
