"""`axonn-jax generate` and `axonn-jax loki` from end to end: a model's texts by every grid and choice of keys."""

import io
import json
import os
import shutil
import signal
import sys

import numpy as np
import pretrained
import pytest
from commands import refusal

from axonn_jax.cli.main import main

PROMPTS = ["the grid", "axis ", "shard and gather of"]


@pytest.fixture(scope="module")
def model(prepared, tmp_path_factory):
    """A directory with a model, whose tokenizer is that of the data."""
    config = pretrained.generating("llama")
    path = pretrained.write_model(tmp_path_factory.mktemp("models") / "llama", config, pretrained.weights(config))
    shutil.copyfile(prepared / "tokenizer.json", path / "tokenizer.json")
    (path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def generate(model, capsys):
    """What the command prints of the three prompts' likeliest texts, or with other flags."""

    def run(*words, command="generate"):
        given = ["--prompts", str(model / "prompts.jsonl"), "--json", "--tokens", "20", "--temperature", "0"]
        assert main([command, str(model), *(given if command == "generate" else ()), *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def texts(found):
    return [one["text"] for one in found]


def test_texts_of_a_file_on_two_grids(generate):
    words = ["--samples", "2", "--logprobs", "--temperature", "1"]
    whole = generate(*words)
    assert [(one["prompt"], one["sample"]) for one in whole] == [(text, n) for text in PROMPTS for n in (0, 1)]
    assert len(set(texts(whole))) == 6
    stop = whole[3]["text"][4:6]
    found = generate(*words, "--stop", stop, "--stop", "never there", "--grid.y", "2", "--slots", "2")
    assert texts(found) == [text.partition(stop)[0] for text in texts(whole)]
    for one, all_ in zip(found, whole, strict=True):
        np.testing.assert_allclose(one["logprobs"], all_["logprobs"][: len(one["logprobs"])], atol=1e-4)
    assert len(found[3]["logprobs"]) < len(whole[3]["logprobs"]) == 20


def test_loki_with_all_features_and_keys_is_full_attention(generate, model, prepared, capsys):
    words = ["--data", str(prepared), "--seq-len", "16", "--tokens", "2000", "--plot", "--json"]
    (told,) = generate(*words, command="loki")
    assert np.shape(told["ranks"]["post"]) == np.shape(told["ranks"]["pre"]) == (2, 2)
    assert (model / "loki.png").read_bytes()[:4] == b"\x89PNG"
    full = generate()
    words = ["--attention", "loki", "--loki.features", "1", "--loki.keys", "1"]
    assert texts(generate(*words)) == texts(full)
    assert main(["generate", str(model), "--prompt", "x", "--tokens", "1", *words]) == 0
    said = "warning: Loki reads 2.00 of what full attention reads, with 3 query heads a KV head, each with its own"
    assert said in capsys.readouterr().err


def test_a_calibration_of_other_weights_is_refused(model, generate, prepared, tmp_path, capsys):
    generate("--data", str(prepared), "--seq-len", "16", "--tokens", "64", "--json", command="loki")
    config = pretrained.generating("llama")
    state = {name: 2 * value for name, value in pretrained.weights(config).items()}
    other = pretrained.write_model(tmp_path / "other", config, state)
    for name in ("tokenizer.json", "loki.safetensors"):
        shutil.copyfile(model / name, other / name)
    line = refusal(capsys, "generate", other, "--prompt", "x", "--attention", "loki")
    assert "--attention = 'loki': a calibration of these weights" in line
    assert f"axonn-jax loki {other} --data DIR" in line


class Interrupted(io.StringIO):
    """A standard output at whose first text the user presses Ctrl-C."""

    def write(self, text):
        os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_an_interrupt_is_one_line_and_status_130(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Interrupted())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    try:
        assert main(["generate", str(model), "--prompt", "x", "--tokens", "40"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
