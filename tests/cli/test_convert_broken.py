"""`axonn-jax convert`: broken and hostile directories, and arguments of no use, are one line."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pretrained
import pytest
from damage import edit_json, huge, link, pipe


def config(**changes):
    return lambda folder: edit_json(folder / "config.json", lambda raw: raw.update(changes))


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


def moved_by(size):
    """The last tensor begins so many bytes later, or earlier."""

    def change(header, body):
        last = max((header[key] for key in header if key != "__metadata__"), key=lambda entry: entry["data_offsets"])
        last["data_offsets"] = [offset + size for offset in last["data_offsets"]]
        return (body[:size] if size < 0 else body + bytes(size),)

    return change


def index(**changes):
    """Turns the directory into one of three files; changes the file of tensors."""

    def write(folder):
        content, tensors = json.loads((folder / "config.json").read_text()), pretrained.read_model(folder)
        shutil.rmtree(folder)
        pretrained.write_model(folder, content, tensors, files=3)
        edit_json(folder / "model.safetensors.index.json", renamed)

    def renamed(raw):
        files = raw["weight_map"] | {{"norm": NORM, "extra": "model.extra"}[old]: new for old, new in changes.items()}
        raw["weight_map"] = {name: file for name, file in files.items() if file is not None}

    return write


def both(*acts):
    return lambda folder: [act(folder) for act in acts]


def moved(name, to):
    return lambda folder: (folder / name).rename(folder / to)


NORM = "model.norm.weight"
THIRD = "model-00003-of-00003.safetensors"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5000000000\n"
SCALED = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BROKEN = {  # each field of a config: files/models/test_huggingface_maps.py
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "config no JSON": (text("config.json", "{"), "config.json': a config in JSON"),
    "config a list": (text("config.json", "[]"), "an object in JSON"),
    "config deep": (text("config.json", "[" * 99_999), "nested too deeply"),
    "config huge": (huge("config.json"), "more than the 16,777,216 that are read"),
    "config a pipe": (pipe("config.json"), "not a regular file"),
    "config elsewhere": (link("config.json", "/etc/hostname"), "a link that leads elsewhere"),
    "model type": (config(model_type="lama"), "config.model_type = 'lama'", "did you mean 'llama'?"),
    "no model type": (config(model_type=None), "config.model_type = None: one of gpt2, llama"),
    "experts": (config(num_local_experts=8), "config.num_local_experts = 8: absent: a llama has no experts"),
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
    "rope type": (config(rope_scaling={"rope_type": "yarm", "factor": 2.0}), "'yarm'", "did you mean 'yarn'?"),
    "rope number": (config(rope_scaling={"rope_type": "linear", "factor": "2"}), "factor = '2': a number above 0"),
    "rope field": (config(rope_scaling={"rope_type": "llama3", **SCALED, "x": 1}), "config.rope_scaling.x = 1"),
    "rope by layer": (config(rope_parameters={"full_attention": {}}), "that differ by layer are not computed"),
    "layers": (config(num_hidden_layers=10**6), "model.layers = 1000000"),
    "more layers": (config(num_hidden_layers=9999), "tensor model.layers.2.", "= None: an array of shape"),
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
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there is no model.safetensors"),
    "a pickle": (moved("model.safetensors", "pytorch_model.bin"), "a pickle may run any code and is not read"),
    "an adapter": (
        both(moved("config.json", "adapter_config.json"), moved("model.safetensors", "adapter_model.safetensors")),
        "merge the adapter into its base first",
    ),
    "tokenizer no JSON": (text("tokenizer.json", "{"), "tokenizer.json': the tokenizer.json of", "is damaged"),
    "no tokenizer": (text("tokenizer.json", '{"model": {"type": "BPE"}}'), "tokenizer.json", "this one is damaged"),
    "a tokenizer's settings": (text("tokenizer_config.json", '{"'), "tokenizer_config.json': a config in JSON"),
    "an end": (text("generation_config.json", "{"), "generation_config.json': an object in JSON"),
    "NaN": (state(lambda s: s[NORM].put(7, np.nan)), f"tensor {NORM} = 'infinite or NaN': finite numbers"),
    "infinite": (state(lambda s: s["lm_head.weight"].put(-1, -np.inf)), "tensor lm_head.weight = 'infinite or NaN'"),
    "beyond float32": (state(lambda s: s.update({NORM: s[NORM] * np.float64(1e300)})), "'infinite or NaN'"),
    "more dense layers than there are": (
        config(model_type="qwen3_moe", mlp_only_layers=[0] * 3),
        "config.mlp_only_layers = [0, 0, 0]: a list of at most 2 layers",
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
    "overlap": (raw(moved_by(-4)), "invalid offset for tensor"),
    "gap": (raw(moved_by(4)), "invalid offset for tensor"),
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
    damage(pretrained.directory(Path("hf"), "llama"))
    refused(["convert", "hf", "out"], *says)
    assert not Path("out").exists()


ARGUMENTS = {
    "nothing": (["convert", "nowhere", "out"], "SOURCE = 'nowhere': an existing directory"),
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
        pretrained.directory(Path("hf"), "llama")
    refused(argv, *says)
