"""Runs that go on: with the masks of their checkpoint, as their settings ask for them, or with a search begun anew."""

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from axonn_jax.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--model.layers", "2", "--model.hidden", "16", "--model.heads", "2", "--model.seq_len", "16"),
    *("--train.global_batch", "4", "--train.warmup", "1", "--train.eval_batches", "1", "--checkpoint.every", "0"),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """What trains a small model with some flags; it returns what is printed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.toml").write_text("[model]\n")

    def command(*words, status=0):
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            got = main([*map(str, words)])
        assert got == status, err.getvalue()
        return out.getvalue() + err.getvalue()

    def run(name, *flags, status=0):
        where = ("--data.path", folder / "data", "--log.dir", folder / name)
        return command("train", folder / "run.toml", *SMALL, *where, *flags, status=status)

    command("prepare", ROOT / "axonn_jax" / "pruned", folder / "data", "--vocab", "300", "--include", "*.py")
    return run


def test_a_search_that_is_interrupted_says_so_and_a_run_that_was_never_pruned(train):
    search = ["--prune.method", "early_bird", "--prune.density", "0.05", "--prune.every", "1"]
    first = train("search", *search, "--train.steps", "3")
    assert "begins anew" not in first
    assert "warning: this run was never pruned, and all its weights are dense: 5 looks in a row" in first
    again = train("search", *search, "--train.steps", "6", "--prune.threshold", "1")
    assert "step 3: the search for a mask begins anew" in again
    assert "warning: this run was never pruned" in again
    assert "warning: this run was never pruned" in train("search", *search, "--train.steps", "6")  # nothing is left
    last = train("search", *search, "--train.steps", "10", "--prune.threshold", "1")
    assert "step 10: pruned 8 kernels to 0.05" in last
    assert "never pruned" not in last
