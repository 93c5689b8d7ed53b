"""What is a name on the Hub and what a path, and which files of a data set are a split's; nothing is asked."""

import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from commands import refusal

from axonn_jax.files.huggingface.hub import HubName, hub_name
from axonn_jax.files.huggingface.splits import _patterns


def test_the_extra_is_named_where_it_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = refusal(capsys, "convert", "org/llama", tmp_path / "out")
    assert line.endswith("or a model on the Hub; for names on the Hub pip install 'axonn_jax[hub]'")
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, "prepare", "org/text", "org", "--vocab", "300")  # a parent of no path
    assert line.endswith("or a data set on the Hub; for names on the Hub pip install 'axonn_jax[hub]'")
    Path("org/text").mkdir(parents=True)
    assert "OUT_DIR" in refusal(capsys, "prepare", "org/text", "org", "--vocab", "300")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["prepare", "runs/typo", "out", "--vocab", "300"],
            "SOURCE = 'runs/typo': an existing folder or file, or a pattern",
        ),
        (["prepare", "runs", "out", "--tokenizer", "runs/typo"], "--tokenizer = 'runs/typo': "),
        (
            ["convert", "runs/typo", "out"],
            "SOURCE = 'runs/typo': an existing directory of a Hugging Face model or of",
        ),
    ],
)
def test_a_path_in_a_folder_that_is_there_is_not_asked_for(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    line = refusal(capsys, *words)
    assert says in line
    assert "Hub" not in line


def test_what_is_there_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") == HubName("org/name", None)
    assert hub_name(Path("org/name@refs/convert/parquet")) == HubName("org/name", "refs/convert/parquet")
    Path("org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("org/other") is None
    assert hub_name("org/other@main") == HubName("org/other", "main")
    for other in ("", "name", "/org/name", "./org/none", "../org", "a/b/c", "org/na me", "org/name@", "a/b..c"):
        assert hub_name(other) is None, other


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"), ("data/train-00000-of-00005.parquet", "train"), ("en/c4-train.00.jsonl.gz", "train"),
        ("default/train/0000.parquet", "train"), ("x/default/train/0000.parquet", "x/train"), ("a/b_test.jsonl", ""),
        ("strain.jsonl", ""), ("train.csv", ""), ("test-train.py", ""),
    ],
)  # fmt: skip
def test_names_of_files_tell_the_split(path, split, tmp_path):
    found = [
        name
        for name in ("train", "x/train")
        if any(fnmatchcase(path, pattern) for pattern in _patterns(tmp_path / "none", name))
    ]
    assert found == ([split] if split != "x/train" else ["train", "x/train"]) * bool(split)
