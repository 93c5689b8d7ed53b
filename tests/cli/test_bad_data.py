"""Data that is not whole, or a run directory that cannot be written, is found before anything is trained."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from damage import edit_json, flip

from axonn_jax.cli.main import main
from axonn_jax.files.data.manifest import Manifest


@pytest.fixture
def data(prepared, place, write_config):
    """A copy of the prepared directory to damage."""
    write_config(data="data")
    return Path(shutil.copytree(prepared, place / "data"))


def corrupt(data):
    flip(data / "train-00000.bin", 10)


def corrupt_tokenizer(data):
    file = data / "tokenizer.json"
    content = bytearray(file.read_bytes())
    at = content.index(b'"vocab"') + 40
    content[at : at + 4] = content[at : at + 4][::-1]
    file.write_bytes(content)


def renamed(raw):
    raw["splits"]["train"]["shards"][0]["name"] = "\x1b]0;owned\x07"


BAD_DATA = {
    "shard cut off": (lambda data: os.truncate(data / "valid-00000.bin", 9), "shard valid-00000.bin has "),
    "shard missing": (lambda data: (data / "train-00000.bin").unlink(), "shard train-00000.bin is missing"),
    "manifest missing": (lambda data: (data / "manifest.json").unlink(), "no manifest.json"),
    "manifest not JSON": (lambda data: (data / "manifest.json").write_text("{"), "not valid JSON"),
    "manifest of another": (lambda data: (data / "manifest.json").write_text("{}"), "not written by"),
    "tokenizer corrupt": (corrupt_tokenizer, "tokenizer.json is corrupt: checksum "),
    "tokenizer missing": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer.json is missing (No such"),
    "names that steer": (lambda data: edit_json(data / "manifest.json", renamed), r"\x1b]0;owned\x07"),
}


@pytest.mark.parametrize("verify", ["true", "false"])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(data, refused, case, verify):
    damage, says = BAD_DATA[case]
    damage(data)
    refused(["train", "run.toml", "--data.verify", verify], "data.path = 'data': ", says)


def test_data_that_is_corrupt_ends_the_run_that_reads_it(data, refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "axonn_jax.run.main")  # the real one
    corrupt(data)
    refused(["train", "run.toml"], "data.path = 'data': ", "shard train-00000.bin is corrupt")


def test_data_that_is_not_to_be_verified_is_not(data, capsys):
    corrupt(data)
    assert main(["train", "run.toml", "--data.verify", "false"]) == 1
    assert "training was started" in capsys.readouterr().err


def test_a_directory_without_a_checksum_of_its_tokenizer_is_taken_as_it_is(data):
    edit_json(data / "manifest.json", lambda raw: raw.pop("tokenizer_sha256"))
    corrupt_tokenizer(data)
    Manifest.load(data).verify()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unwritable for root")
def test_directory_that_cannot_be_written(write_config, place, refused):
    (place / "closed").mkdir(mode=0o500)
    write_config({"log": ['dir = "closed/run"']})
    refused(["train", "run.toml"], "log.dir = 'closed/run'", "closed cannot")
