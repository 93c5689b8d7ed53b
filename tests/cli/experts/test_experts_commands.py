"""Lines that a run of experts says at its start: of a dense run's layers as experts, of an export that cannot be."""

from pathlib import Path

import pytest

from axonn_jax.cli.main import main
from axonn_jax.core.experts.shape import ExpertShape, MoeConfig
from axonn_jax.core.experts.upcycle import other_function
from axonn_jax.core.models.presets import preset
from axonn_jax.files.huggingface.entries import why_not_exported

ROOT = Path(__file__).resolve().parents[3]
SMALL = """
layers = 2
hidden = 16
heads = 2
seq_len = 16
ffn = 16
positions = "rope"
norm = "rmsnorm"
mlp = "swiglu"
bias = "none"
tied = false
qk_norm = true
"""
COPIES = "each expert is a copy of the dense layer, routers are new"


@pytest.fixture(scope="module")
def dense(prepared, tmp_path_factory):
    """A folder with a dense run of one step."""
    folder = tmp_path_factory.mktemp("runs")
    steps = "steps = 1\nwarmup = 0\nglobal_batch = 4\neval_batches = 1"
    (folder / "run.toml").write_text(f'[model]{SMALL}[data]\npath = "{prepared}"\n[train]\n{steps}\n')
    assert main(["train", str(folder / "run.toml"), "--log.dir", str(folder / "dense")]) == 0
    return folder


def test_a_run_says_at_its_start_what_would_surprise_at_its_end(dense, capsys):
    words = ["train", str(dense / "run.toml"), "--checkpoint.weights", str(dense / "dense"), "--log.dir"]
    settings = ["--model.experts", "4", "--model.router_norm", "false", "--moe.balance_rate", "0.001"]
    capsys.readouterr()
    assert main([*words, str(dense / "moe"), *settings]) == 0
    lines = capsys.readouterr().err.splitlines()
    (copied,) = [line for line in lines if COPIES in line]
    assert copied.endswith("with model.router_norm = false the experts compute another function than the dense layer")
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "cannot make a Hugging Face model of this run: moe.balance_rate moves routers' biases" in note
    first = next(at for at, line in enumerate(lines) if line.startswith("step 1/1"))
    assert max(lines.index(copied), lines.index(note)) < first
    assert main(["convert", str(dense / "moe"), str(dense / "export")]) == 2
    assert "router.bias = 'not 0'" in capsys.readouterr().err


def test_what_makes_equal_experts_another_function():
    few, every = ExpertShape(4, 2, 8), ExpertShape(4, 4, 8, norm=False)
    assert {other_function(shape, MoeConfig()) for shape in (few, every)} == {""}
    assert other_function(ExpertShape(4, 2, 8, scale=2.5), MoeConfig()) == "model.router_scale = 2.5"
    assert (
        other_function(ExpertShape(4, 4, 8, router="sigmoid", norm=False), MoeConfig()) == "model.router_norm = false"
    )
    assert other_function(few, MoeConfig(dispatch="capacity")) == "moe.dispatch = capacity"


def test_why_a_mixture_is_not_exported():
    assert why_not_exported(preset("mixtral-8x7b"), biases_move=False) == ""
    assert "moe.balance_rate" in why_not_exported(preset("mixtral-8x7b"), biases_move=True)
    sigmoid = preset("mixtral-8x7b", router="sigmoid")
    assert "no family" in why_not_exported(sigmoid, biases_move=False)
