"""Settings changed before a run goes on: the function that was trained stays, or a line names what differs."""

import dataclasses
import functools
import json
import shutil

import grids
import numpy as np
import optax
import pretrained
import pytest
from commands import refusal
from damage import edit_json
from flax import nnx
from launched import write_config

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.manifest import MANIFEST, CheckpointManifest, read
from axonn_jax.core.checkpoint.restore import Checkpoint, check_model
from axonn_jax.files.huggingface.families import shape_from_config
from axonn_jax.run.config_file import loads

SIZES = "layers = 2\nhidden = 32\nheads = 4\nffn = 64\nvocab = 64\nseq_len = 32\n"
LLAMA = SIZES + 'positions = "rope"\nnorm = "rmsnorm"\nmlp = "swiglu"\nbias = "none"\ntied = false\n'
STRETCHED = LLAMA + "rope_factor = 4.0\nrope_original_seq_len = 4096\n"
EXPERTS = LLAMA + 'experts = 4\nexpert_ffn = 16\nrouter = "sigmoid"\n'
MODELS = {
    "gpt": SIZES,
    "llama": LLAMA,
    "llama3": STRETCHED + 'rope_scaling = "llama3"\n',
    "yarn": STRETCHED + 'rope_scaling = "yarn"\n',
    "gemma2": LLAMA + "window = 8\nwindow_period = 2\nattention_cap = 50.0\nlogits_cap = 30.0\npost_norms = true\n",
    "experts": EXPERTS,
    "sparse": EXPERTS + "moe_every = 2\n",
}
CHANGES = {
    "gpt": {"seq_len": 16, "kv_heads": 2, "norm_eps": 1e-2, "window": 4, "mlp": "swiglu"},
    "llama": {
        **{"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "vocab": 128, "head_dim": 16},
        **{"positions": "learned", "mlp": "geglu", "bias": "qkv", "tied": True, "norm_eps": 1e-2, "qk_norm": True},
        **{"norm": "rmsnorm_1p", "rope_theta": 5e5, "embedding_scale": True, "window": 31, "experts": 4},
    },
    "llama3": {
        **{"rope_factor": 8.0, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 64.0, "rope_scaling": "linear"}
    },
    "yarn": {"rope_beta_fast": 2.0, "rope_beta_slow": 0.01, "rope_attention_factor": 2.0, "rope_original_seq_len": 32},
    "gemma2": {
        **{"window": 4, "window_period": 3, "attention_cap": 0.0, "logits_cap": 1.0, "score_dim": 16},
        "post_norms": False,
    },
    "experts": {
        **{"experts_per_token": 1, "expert_ffn": 32, "moe_every": 2, "moe_first": 1, "shared_experts": 1},
        **{"router": "softmax", "router_norm": False, "router_scale": 2.0, "router_groups": 2, "experts": 8},
    },
}
"""Single fields that change what a model computes."""
SAME = {
    "gpt": {"rope_theta": 5e5, "dropout": 0.1, "window": 32, "head_dim": 8, "kv_heads": 4},
    "llama": {
        **{"dropout": 0.1, "init_std": 0.1, "window": 4096, "seq_len": 16, "attention": "xla"},
        **{"rope_factor": 4.0, "rope_low_freq_factor": 2.0, "rope_original_seq_len": 16, "rope_beta_fast": 2.0},
    },
    "llama3": {"rope_beta_slow": 2.0, "rope_attention_factor": 2.0},
    "yarn": {"rope_high_freq_factor": 8.0, "rope_attention_factor": 0.1 * np.log(4.0).item() + 1.0},
    "experts": {"ffn": 128},
    "sparse": {"moe_every": 3},
}
"""Those that do not, of such a model."""


def config(model, **changes):
    return loads("[model]\n" + MODELS[model], [("data.path", "-"), *((f"model.{k}", v) for k, v in changes.items())])


@functools.cache
def kept(model):
    """What a checkpoint keeps of a run."""
    run = json.loads(json.dumps({"model": dataclasses.asdict(config(model).model.shape())}))
    return Checkpoint("step_00000004", CheckpointManifest(4, "", 1, "", run, {}, {}))


def cases(table):
    return [
        pytest.param(model, {key: value}, id=f"{model} {key}") for model in table for key, value in table[model].items()
    ]


@pytest.mark.parametrize(("model", "change"), cases(CHANGES))
def test_a_changed_function_is_a_line(model, change):
    with pytest.raises(UserError) as caught:
        check_model(kept(model), config(model, **change).model.shape(), "checkpoint.resume")
    ((key, value),) = change.items()
    assert str(caught.value).startswith("checkpoint.resume = 'step_00000004': a checkpoint of this model; model.")
    assert f"model.{key} = {value} (" in str(caught.value)


@pytest.mark.parametrize(("model", "change"), cases(SAME))
def test_the_same_function_goes_on(model, change):
    check_model(kept(model), config(model, **change).model.shape(), "checkpoint.resume")


def test_a_checkpoint_without_sizes_is_no_transformer_s(two, tmp_path, capsys):
    """As that of a model of other layers is."""
    says = "a checkpoint of a transformer, with its sizes in manifest.json"
    model = ax.models.Transformer(config("gpt").model.shape(), rngs=nnx.Rngs(0))
    trainer = ax.Trainer(model, optax.sgd(0.1), grids.lay(GridShape()))
    with pytest.raises(UserError, match=says):
        trainer.load(two / "step_00000004")
    (tmp_path / "config.toml").write_text(f"[model]\n{SIZES}")
    shutil.copytree(two, tmp_path / "checkpoints")
    refused(["convert", str(tmp_path), str(tmp_path / "out")], capsys, "SOURCE = ", "step_00000004", says)
    assert not (tmp_path / "out").exists()


def test_every_field_of_a_model_is_looked_at():
    asked = {key for table in (CHANGES, SAME) for changes in table.values() for key in changes}
    assert {f.name for f in dataclasses.fields(ax.models.ModelShape)} - asked == {"router_groups_kept"}


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    """A run of two steps, and what starts it again."""
    root = tmp_path_factory.mktemp("changed")
    config = write_config(root / "c.toml", prepared)
    argv = ["train", str(config), "--log.dir", str(root / "run"), "--train.warmup", "0", "--train.steps"]
    assert main([*argv, "2"]) == 0
    return root, argv


def refused(argv, capsys, *says):
    line = refusal(capsys, *argv, alone=False)
    assert all(text in line for text in says), line


def test_a_run_does_not_go_on_as_another_model(run, tmp_path, capsys):
    root, argv = run
    differs = "a checkpoint of this model; model.heads = 2 (4 there), model.kv_heads = 2 (4 there), model.head_dim = 16"
    heads = ["--model.heads", "2"]
    refused([*argv, "3", *heads], capsys, "checkpoint.resume = ", differs)
    argv = [*argv[:3], str(tmp_path / "new"), *argv[4:], "1", "--checkpoint.weights", str(root / "run"), *heads]
    refused(argv, capsys, "checkpoint.weights = ", differs)
    moved = root / "run" / "checkpoints" / "step_00000002"
    trainer = ax.Trainer(
        ax.models.Transformer(dataclasses.replace(ax.models.shape_of(moved), norm_eps=1.0), rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        grids.lay(GridShape()),
    )
    with pytest.raises(UserError, match=r"model\.norm_eps = 1\.0 \(1e-05 there\)"):
        trainer.load(moved, weights_only=True)
    text = (root / "run" / "config.toml").read_text()
    (root / "run" / "config.toml").write_text(text.replace("norm_eps = 1e-05", "norm_eps = 0.5"))
    refused(
        ["generate", str(root / "run"), "--prompt", "x"], capsys, "RUN_DIR = ", "model.norm_eps = 0.5 (1e-05 there)"
    )
    (root / "run" / "config.toml").write_text(text)


def test_a_shape_comes_from_any_directory_of_a_model(run, tmp_path):
    root, _ = run
    shape = ax.models.shape_of(root / "run")
    assert (shape.layers, shape.hidden, shape.heads, shape.vocab) == (1, 32, 4, 300)
    step = (root / "run" / "checkpoints" / "step_00000002").rename(tmp_path / "step_00000002")
    assert ax.models.shape_of(str(step)) == shape
    assert read(step).run["model"] == dataclasses.asdict(shape)
    edit_json(step / MANIFEST, lambda raw: raw["content"]["run"]["model"].update(heads="4"))
    llama = pretrained.CONFIGS["llama"]
    assert ax.models.shape_of(pretrained.write_model(tmp_path / "hf", llama, {})) == shape_from_config(llama)
    for folder, says in ((tmp_path, "a step_N"), (step, r"model\.heads = '4': an integer")):
        with pytest.raises(UserError, match=says):
            ax.models.shape_of(folder)
    step.rename(root / "run" / "checkpoints" / "step_00000002")


def test_a_pretrained_directory_is_not_loaded_as_another_model(tmp_path):
    folder = pretrained.directory(tmp_path / "hf", "llama")
    shape = dataclasses.replace(ax.models.shape_of(folder), rope_theta=5.0)
    trainer = ax.Trainer(ax.models.Transformer(shape, rngs=nnx.Rngs(0)), optax.sgd(0.1), grids.lay(GridShape()))
    with pytest.raises(UserError, match=r"model\.rope_theta = 5\.0 \(10000\.0 there\)"):
        trainer.load(folder, weights_only=True)
