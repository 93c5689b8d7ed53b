"""`plan` for models of one's own: a configuration, a run, a directory in Hugging Face's layout."""

import dataclasses
import json
import shlex

import pytest

from axonn_jax.cli.main import main
from axonn_jax.models.huggingface.families import config_from_shape
from axonn_jax.models.presets import preset
from axonn_jax.train.config_file import read, split_argv

MACHINE = ("--machine", "perlmutter", "--devices", "16", "--json")
OWN = """
[model]
layers = 12
hidden = 1024
heads = 16
vocab = 32000
seq_len = 1024
positions = "rope"
norm = "rmsnorm"
mlp = "swiglu"
bias = "none"
[data]
path = "not/there"
[train]
global_batch = 64
"""


def planned(capsys, *words):
    assert main(["plan", *words, *MACHINE]) == 0
    return json.loads(capsys.readouterr().out)


def settled(command):
    """The configuration of a command that a plan prints."""
    words = shlex.split(command)
    (path, *_), flags = split_argv(words[words.index("train") + 1 :])
    return read(path, flags)


def test_a_configuration_is_planned_as_the_preset_of_its_sizes(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text('[model]\npreset = "gpt-5b"\n[data]\npath = "x"\n[train]\nglobal_batch = 32\n')
    own = planned(capsys, "--model", str(file))
    known = planned(capsys, "--model", "gpt-5b", "--batch-tokens", str(32 * preset("gpt-5b").seq_len))
    for found in (own, known):
        for one in found["configs"]:
            one.pop("command")
        found.pop("model")
    assert own == known


def test_the_command_for_ones_own_sizes_trains_what_was_planned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    found = planned(capsys, "--model", str(file), "--grid.pipe", "2")
    assert found["batch_sequences"] == 64
    best = found["configs"][0]
    config = settled(best["command"])
    assert config.model.shape() == read(file).model.shape()
    assert dataclasses.asdict(config.grid).items() >= {"pipe": 2, "data": best["data"], "z": best["z"]}.items()
    assert config.train.microbatches == best["microbatches"]


def test_a_run_and_a_hugging_face_model_are_planned_alike(tmp_path, capsys):
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(OWN)
    model.mkdir()
    shape = read(run / "config.toml").model.shape()
    (model / "config.json").write_text(json.dumps(config_from_shape(shape, "float32", None)))
    plans = [planned(capsys, "--model", str(path), "--batch-tokens", "65536") for path in (run, model)]
    same = [{key: value for key, value in plan["configs"][0].items() if key != "command"} for plan in plans]
    assert same[0] == same[1]
    (tmp_path / "CONFIG.toml").write_text('[data]\npath = "x"\n')
    command = plans[1]["configs"][0]["command"].replace("CONFIG.toml", str(tmp_path / "CONFIG.toml"))
    assert settled(command).model.shape() == shape
    assert settled(command).checkpoint.weights == str(model)


def test_a_pruned_configuration_is_planned_pruned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN + "[prune]\ndensity = 0.1\n")
    assert planned(capsys, "--model", str(file))["density"] == 0.1
    assert planned(capsys, "--model", str(file), "--density", "0.5")["density"] == 0.5


def test_a_state_that_is_not_counted_is_said(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN.replace("[train]", '[train]\noptimizer = "lion"\nema = 0.99'))
    assert main(["plan", "--model", str(file), *MACHINE[:-1]]) == 0
    words = (
        "optimizer: AdamW's two moments a parameter are counted, in the place of train.optimizer = lion and train.ema"
    )
    assert words in capsys.readouterr().out


def test_the_command_leaves_no_setting_of_the_file_that_was_not_planned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN + 'ema = 0.9\n[grid]\ndata = 3\n[memory]\noffload = "optimizer"\nzero = 1\n')
    found = planned(capsys, "--model", str(file), "--offload", "none", "--zero", "0")
    for best in found["configs"]:
        config = settled(best["command"])
        assert config.grid.devices == 16
        assert (config.grid.pipe, config.memory.offload, config.memory.zero) == (1, "none", 0)  # as ema asks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "--model = '{file}': "),
        (OWN + "[lora]\nrank = 8\n", "--model = '{file}': a configuration without [lora]: a plan counts all weights"),
        (OWN.replace("vocab = 32000\n", ""), "model.vocab = (not given): given in {file}, or its data prepared"),
        ("[model", "CONFIG.toml = '{file}': valid TOML"),
        (OWN.replace("layers", "layer"), "did you mean"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, capsys, text, words):
    file = tmp_path / ("own.toml" if text else "nothing")
    if text:
        file.write_text(text)
    assert main(["plan", "--model", str(file), *MACHINE]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.format(file=file) in line
