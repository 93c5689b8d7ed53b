"""`axonn-jax convert`: the way there and back is exact for every family."""

import json
import os
import re
import struct
from dataclasses import replace

import numpy as np
import pretrained
import pytest
from commands import answer, refusal
from hub_server import files_of

from axonn_jax.cli.main import main
from axonn_jax.core.models.comparison import differences
from axonn_jax.core.models.rope import frequencies
from axonn_jax.files.huggingface.families import config_from_shape, shape_from_config
from axonn_jax.files.huggingface.pretrained import shape_of
from axonn_jax.run import config_file


def same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert got[name].tobytes() == value.tobytes(), name


def carried(folder):
    return {name: raw for name, raw in files_of(folder).items() if not name.startswith("model")}


@pytest.mark.parametrize(("files", "dtype"), [(1, pretrained.F32), (3, pretrained.BF16)])
@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_there_and_back_is_exact(name, files, dtype, tmp_path, capsys):
    state = pretrained.weights(pretrained.CONFIGS[name], dtype)
    source = pretrained.write_model(tmp_path / "hf", pretrained.CONFIGS[name], state, files)
    small = [] if files == 1 else ["--shard-size", "0.00005"]
    assert main(["convert", str(source), str(tmp_path / "run"), *small]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), *small]) == 0
    capsys.readouterr()
    for folder in (tmp_path / "run", tmp_path / "out"):
        same(pretrained.read_model(folder), state)
        assert (len(list(folder.glob("*.safetensors"))) > 1) == (files > 1)
    config = (tmp_path / "run" / "config.toml").read_text()
    assert carried(tmp_path / "out") == carried(source)
    assert carried(tmp_path / "run") == carried(source) | {"config.toml": config.encode()}
    shape = shape_from_config(pretrained.CONFIGS[name])
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    read = config_file.read(moved / "config.toml", [("data.path", "data")])
    assert read.model.shape() == shape
    assert read.checkpoint.weights == str(moved)


@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_a_new_config_trains_on_sequences_of_usual_length(name, tmp_path, capsys):
    """Nothing but their length differs, rotation at every position included; the way back says the model's own."""
    longest = 40_960 if name != "gpt2" else 4096  # whose positions are weights
    config = pretrained.CONFIGS[name] | {key: longest for key in pretrained.LENGTHS if key in pretrained.CONFIGS[name]}
    source = pretrained.write_model(tmp_path / "hf", config, pretrained.weights(config))
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    line = "trains on sequences of 2,048 tokens; up to 40,960 by model.seq_len in config.toml"
    assert (line in capsys.readouterr().out.splitlines()) == (name != "gpt2")
    file, own = tmp_path / "run" / "config.toml", shape_from_config(config)

    def shape(*given):
        return config_file.read(file, [("data.path", "data"), *given]).model.shape()

    assert shape() == replace(own, seq_len=4096 if name == "gpt2" else 2048)
    assert shape(("model.seq_len", longest)) == own
    assert shape_of(tmp_path / "run") == own  # as it is generated from
    assert differences(shape(), own) == []
    if own.positions == "rope":
        np.testing.assert_array_equal(frequencies(shape()), frequencies(own))
    assert "seq_len" not in answer(capsys, "convert", str(tmp_path / "run"), str(tmp_path / "out"))
    assert carried(tmp_path / "out") == carried(source)


@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_a_config_made_of_a_shape_says_the_same(name):
    """Also what transformers takes for granted where a field is missing."""
    shape = shape_from_config(pretrained.CONFIGS[name])
    made = config_from_shape(shape, "float32", 0)
    assert shape_from_config(json.loads(json.dumps(made))) == shape


def test_an_index_names_each_file(tmp_path):
    source, state = pretrained.directory(tmp_path / "hf", "qwen3"), pretrained.weights(pretrained.CONFIGS["qwen3"])
    assert main(["convert", str(source), str(tmp_path / "run"), "--shard-size", "0.00005"]) == 0
    index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    for name in set(index["weight_map"].values()):
        assert re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)
        raw = (tmp_path / "run" / name).read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert {key for key, where in index["weight_map"].items() if where == name} == header.keys()
        assert len(header) == 1 or sum(state[key].nbytes for key in header) <= 50_000


def test_dtypes(tmp_path, capsys):
    """To bf16 as numpy rounds, from bf16 exactly, and config.json says so in its own spelling."""
    config = pretrained.CONFIGS["gpt2"]
    state = pretrained.weights(config)
    pretrained.write_model(tmp_path / "hf", config, state)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "b"), "--dtype", "bf16"]) == 0
    assert main(["convert", str(tmp_path / "b"), str(tmp_path / "f"), "--dtype", "fp32", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["to"], told["dtype"], told["files"]) == ("huggingface", "float32", 1)
    rounded = {name: value.astype(pretrained.BF16) for name, value in state.items()}
    same(pretrained.read_model(tmp_path / "b"), rounded)
    same(pretrained.read_model(tmp_path / "f"), {name: value.astype(np.float32) for name, value in rounded.items()})
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config | {"dtype": "bfloat16"}
    assert json.loads((tmp_path / "f" / "config.json").read_text()) == config


def test_published_files_without_the_prefix_with_buffers_and_the_tied_head(tmp_path):
    config = pretrained.CONFIGS["gpt2"]
    state = pretrained.weights(config)
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    bare |= {"lm_head.weight": bare["wte.weight"], "h.0.attn.bias": np.ones((1, 1, 64, 64), bool)}
    pretrained.write_model(tmp_path / "hf", config, bare)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    same(pretrained.read_model(tmp_path / "run"), state)


def test_the_hubs_cache_whose_files_are_links(tmp_path):
    source = pretrained.directory(tmp_path / "models--a--b" / "snapshots" / "0123", "llama")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    small = carried(source)
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), path.parent))
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert small.items() <= carried(tmp_path / "run").items()
    same(pretrained.read_model(tmp_path / "run"), pretrained.weights(pretrained.CONFIGS["llama"]))


def test_a_folder_called_tokenizer_is_left_aside(tmp_path):
    source = pretrained.directory(tmp_path / "hf", "llama")
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "tokenizer.json").write_text("{}")
    (source / "vocab.json").mkdir()
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert {"tokenizer", "vocab.json"}.isdisjoint(os.listdir(tmp_path / "run"))


def test_force_replaces_a_converted_directory_and_nothing_else(tmp_path, capsys):
    argv = ["convert", str(pretrained.directory(tmp_path / "hf", "llama")), str(tmp_path / "run")]
    assert main(argv) == 0
    assert "--force replaces this converted one" in refusal(capsys, *argv)
    assert main([*argv, "--force", "--shard-size", "0.00005"]) == 0
    assert not (tmp_path / "run" / "model.safetensors").exists()
    (tmp_path / "run" / "notes.md").write_text("mine")
    assert "this one holds 'notes.md'" in refusal(capsys, *argv, "--force")
