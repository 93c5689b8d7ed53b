"""`axonn-jax convert`: the way there and back is exact for every family, and broken or hostile input is one line."""

import json
import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pretrained
import pytest

from axonn_jax.cli.main import main
from axonn_jax.models.huggingface import shape_from_config
from axonn_jax.models.huggingface.families import config_from_shape
from axonn_jax.models.huggingface.pretrained import differences, shape_of
from axonn_jax.train import config_file


def same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape), name
        assert got[name].tobytes() == value.tobytes(), name


def carried(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("model")}


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
    if own.rope is not None:
        np.testing.assert_array_equal(shape().rope.frequencies(16), own.rope.frequencies(16))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
    assert "seq_len" not in json.loads(capsys.readouterr().out)
    assert carried(tmp_path / "out") == carried(source)


@pytest.mark.parametrize("name", pretrained.CONFIGS)
def test_a_config_made_of_a_shape_says_the_same(name):
    """Also what transformers takes for granted where a field is missing."""
    shape = shape_from_config(pretrained.CONFIGS[name])
    made = config_from_shape(shape, "float32", 0)
    assert shape_from_config(json.loads(json.dumps(made))) == shape


def test_an_index_names_each_file(tmp_path):
    config = pretrained.CONFIGS["qwen3"]
    source = pretrained.write_model(tmp_path / "hf", config, pretrained.weights(config))
    assert main(["convert", str(source), str(tmp_path / "run"), "--shard-size", "0.00005"]) == 0
    index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
    state = pretrained.weights(config)
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
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["to"], answer["dtype"], answer["files"]) == ("huggingface", "float32", 1)
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
    config = pretrained.CONFIGS["llama"]
    cached = tmp_path / "models--a--b" / "snapshots" / "0123"
    source = pretrained.write_model(cached, config, pretrained.weights(config))
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    same(pretrained.read_model(tmp_path / "run"), pretrained.weights(config))


def test_a_folder_called_tokenizer_is_left_aside(tmp_path):
    config = pretrained.CONFIGS["llama"]
    source = pretrained.write_model(tmp_path / "hf", config, pretrained.weights(config))
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "tokenizer.json").write_text("{}")
    (source / "vocab.json").mkdir()
    assert main(["convert", str(source), str(tmp_path / "run")]) == 0
    assert {path.name for path in source.iterdir() if path.is_dir()}.isdisjoint(os.listdir(tmp_path / "run"))


def test_force_replaces_a_converted_directory_and_nothing_else(tmp_path, capsys):
    config = pretrained.CONFIGS["llama"]
    source = pretrained.write_model(tmp_path / "hf", config, pretrained.weights(config))
    argv = ["convert", str(source), str(tmp_path / "run")]
    assert main(argv) == 0
    assert main(argv) == 2
    assert "--force replaces this converted one" in capsys.readouterr().err
    assert main([*argv, "--force", "--shard-size", "0.00005"]) == 0
    assert not (tmp_path / "run" / "model.safetensors").exists()
    (tmp_path / "run" / "notes.md").write_text("mine")
    assert main([*argv, "--force"]) == 2
    assert "this one holds 'notes.md'" in capsys.readouterr().err


# Broken and hostile directories


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def state(change, name="model.safetensors"):
    """Writes the tensors anew, by the library, after a change."""

    def write(folder):
        import safetensors.numpy

        tensors = safetensors.numpy.load_file(folder / name)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / name)

    return write


def raw(change):
    """Writes the file anew with a changed header, or other bytes."""

    def write(folder):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        made = change(header, content[8 + length :])
        if isinstance(made, bytes):
            path.write_bytes(made)
            return
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + (content[8 + length :] if made is None else made[0]))

    return write


def shift(header, body):
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])
    header[last]["data_offsets"][0] -= 4
    header[last]["data_offsets"][1] -= 4
    return (body[:-4],)


def gap(header, body):
    last = max((key for key in header if key != "__metadata__"), key=lambda key: header[key]["data_offsets"])
    header[last]["data_offsets"][0] += 4
    header[last]["data_offsets"][1] += 4
    return (body + bytes(4),)


def index(**changes):
    """Turns the directory into one of three files; changes the file of tensors."""

    def write(folder):
        content, tensors = json.loads((folder / "config.json").read_text()), pretrained.read_model(folder)
        for path in list(folder.iterdir()):
            path.unlink()
        folder.rmdir()
        pretrained.write_model(folder, content, tensors, files=3)
        path = folder / "model.safetensors.index.json"
        raw = json.loads(path.read_text())
        for old, new in changes.items():
            key = {"norm": "model.norm.weight", "extra": "model.extra"}[old]
            raw["weight_map"][key] = new
            if new is None:
                del raw["weight_map"][key]
        path.write_text(json.dumps(raw))

    return write


def both(*acts):
    return lambda folder: [act(folder) for act in acts]


def moved(name, to):
    return lambda folder: (folder / name).rename(folder / to)


def link(name, to):
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to(to))


def pipe(name):
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


NORM = "model.norm.weight"
THIRD = "model-00003-of-00003.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000000000\n"
SCALED = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "config no JSON": (text("config.json", "{"), "config.json': a config in JSON"),
    "config a list": (text("config.json", "[]"), "an object in JSON"),
    "config deep": (text("config.json", "[" * 99_999), "nested too deeply"),
    "config huge": (lambda f: os.truncate(f / "config.json", 1 << 40), "more than the 16,777,216 that are read"),
    "config a pipe": (pipe("config.json"), "not a regular file"),
    "config elsewhere": (link("config.json", "/etc/hostname"), "a link that leads elsewhere"),
    "model type": (config(model_type="lama"), "config.model_type = 'lama'", "did you mean 'llama'?"),
    "no model type": (config(model_type=None), "config.model_type = None: one of gpt2, llama"),
    "experts": (config(num_local_experts=8), "config.num_local_experts = 8: absent: a llama has no experts"),
    "quantised config": (config(quantization_config={"bits": 4}), "config.quantization_config"),
    "both directions": (config(is_causal=False), "config.is_causal = False: true or absent"),
    "no direction": (config(is_causal=None), "config.is_causal = None: true or false"),
    "layers apart": (config(per_layer_config={"0": {"hidden_act": "relu"}}), "config.per_layer_config", "absent"),
    "a pointer of LFS": (text("model.safetensors", LFS), "model.safetensors': a sound", "Git LFS", "`git lfs pull`"),
    "tokenizer a pointer": (text("tokenizer.json", LFS), "tokenizer.json': a small file; a pointer of Git LFS"),
    "config a pointer": (text("config.json", LFS), "config.json': a config in JSON; a pointer of Git LFS"),
    "shards without an index": (
        both(index(), lambda f: (f / "model.safetensors.index.json").unlink()),
        "= 'hf': model.safetensors, or model.safetensors.index.json, which names the file of each tensor, beside",
    ),
    "weights behind a link": (
        lambda f: link("model.safetensors", (f / "model.safetensors").resolve().rename(f.resolve().parent / "w"))(f),
        "a link that leads elsewhere (/",
        "/w); give the directory that has the file itself, or a copy of it",
    ),
    "weights behind a broken link": (
        link("model.safetensors", "nowhere"),
        "the link leads to nowhere, which is missing",
    ),
    "softcapping": (config(attn_logit_softcapping=50.0), "config.attn_logit_softcapping = 50.0: absent"),
    "partial rotary": (config(partial_rotary_factor=0.5), "config.partial_rotary_factor = 0.5: 1.0"),
    "rope type": (config(rope_scaling={"rope_type": "yarm", "factor": 2.0}), "'yarm'", "did you mean 'yarn'?"),
    "rope number": (config(rope_scaling={"rope_type": "linear", "factor": "2"}), "factor = '2': a number above 0"),
    "rope field": (config(rope_scaling={"rope_type": "llama3", **SCALED, "x": 1}), "config.rope_scaling.x = 1"),
    "rope by layer": (config(rope_parameters={"full_attention": {}}), "that differ by layer are not computed"),
    "heads": (config(num_attention_heads=5), "model.heads = 5"),
    "layers": (config(num_hidden_layers=10**6), "model.layers = 1000000"),
    "more layers": (config(num_hidden_layers=9999), "tensor model.layers.2.", "= None: an array of shape"),
    "activation": (config(hidden_act="relu"), "config.hidden_act = 'relu': 'silu'"),
    "a size of digits": (text("config.json", '{"model_type": "llama", "hidden_size": 1' + "0" * 4000 + "}"), "config."),
    "window by layer": (
        config(model_type="qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "config.max_window_layers = 1: 0, or num_hidden_layers = 2",
    ),
    "layer types": (
        config(model_type="qwen3", layer_types=["full_attention", "sliding_attention"]),
        "config.layer_types",
        "a window that differs by layer",
    ),
    "a bias": (config(attention_bias=True), "config.attention_bias = True"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is no model.safetensors"),
    "a pickle": (moved("model.safetensors", "pytorch_model.bin"), "a pickle may run any code and is not read"),
    "an adapter": (
        both(moved("config.json", "adapter_config.json"), moved("model.safetensors", "adapter_model.safetensors")),
        "merge the adapter into its base first",
    ),
    "sentencepiece": (text("tokenizer.model", ""), "the form of sentencepiece is not read"),
    "a tokenizer elsewhere": (lambda f: (f / "tokenizer.json").symlink_to("/dev/zero"), "leads elsewhere"),
    "weights empty": (text("model.safetensors", ""), "a sound safetensors file; header too small"),
    "weights a pipe": (pipe("model.safetensors"), "not a regular file"),
    "weights elsewhere": (link("model.safetensors", "/dev/zero"), "a link that leads elsewhere"),
    "header too long": (raw(lambda h, b: struct.pack("<Q", 10**6) + b), "invalid header length"),
    "header endless": (raw(lambda h, b: b"\xff" * 8 + b), "header too large"),
    "header no JSON": (raw(lambda h, b: struct.pack("<Q", 8) + b"\x1b[2Jnone" + b), "invalid JSON in header"),
    "cut off": (raw(lambda h, b: (b[:-9],)), "file not fully covered"),
    "overlap": (raw(shift), "invalid offset for tensor"),
    "gap": (raw(gap), "invalid offset for tensor"),
    "size": (raw(lambda h, b: h[NORM].update(shape=[47])), "invalid shape, data type, or offset"),
    "a huge size": (raw(lambda h, b: h[NORM].update(shape=[2**62, 48])), "overflow"),
    "quantised weights": (state(lambda s: s.update({NORM: s[NORM].astype(np.int8)})), "quantised weights are not"),
    "shape": (state(lambda s: s.update({NORM: s[NORM][:9]})), f"shape of {NORM} = (9,): (48,)"),
    "missing": (state(lambda s: s.pop(NORM)), f"tensor {NORM} = None: an array of shape (48,)"),
    "left over": (state(lambda s: s.update(x=s[NORM])), "checkpoint tensor = 'model.x'"),
    "not tied": (both(config(tie_word_embeddings=True)), "tie_word_embeddings = True: false"),
    "shard missing": (both(index(), lambda f: (f / THIRD).unlink()), f"{THIRD}': a file that is there"),
    "shard elsewhere": (both(index(), link(THIRD, "/dev/zero")), "a link that leads elsewhere"),
    "index no JSON": (both(index(), text("model.safetensors.index.json", "{")), "an index in JSON"),
    "index a list": (both(index(), text("model.safetensors.index.json", "[]")), "an index with a weight_map"),
    "index leads out": (index(norm="../hf/model.safetensors"), "a .safetensors file beside"),
    "index leads away": (index(norm="/etc/passwd"), f"file of {NORM} = '/etc/passwd'"),
    "index names another": (index(norm="model-00001-of-00003.safetensors"), "as model.safetensors.index.json says"),
    "index has more": (index(extra=THIRD), "a file with the tensor 'model.extra'"),
    "index has less": (index(norm=None), f"'{NORM}' is not among them"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_or_hostile_is_one_line(case, place, refused):
    damage, *says = BROKEN[case]
    llama = pretrained.CONFIGS["llama"]
    damage(pretrained.write_model(Path("hf"), llama, pretrained.weights(llama)))
    refused(["convert", "hf", "out"], *says)
    assert not Path("out").exists()


ARGUMENTS = {
    "nothing": (["convert", "nowhere", "out"], "SOURCE = 'nowhere': a directory"),
    "an empty directory": (["convert", ".", "out"], "SOURCE = '.': a step_N, or a run directory"),
    "inside": (["convert", "hf", "hf"], "DEST = ", "a directory other than SOURCE"),
    "dtype": (["convert", "hf", "out", "--dtype", "fp16"], "--dtype = 'fp16': one of keep, bf16, fp32"),
    "size": (["convert", "hf", "out", "--shard-size", "0"], "--shard-size = 0.0"),
    "no torch": (["convert", "hf", "out", "--check"], "--check = True: torch and transformers installed"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_of_no_use_are_one_line(case, place, refused, monkeypatch):
    monkeypatch.setattr("axonn_jax.cli.convert.find_spec", lambda name: None)
    argv, *says = ARGUMENTS[case]
    if "hf" in argv:
        pretrained.write_model(Path("hf"), pretrained.CONFIGS["llama"], pretrained.weights(pretrained.CONFIGS["llama"]))
    refused(argv, *says)
