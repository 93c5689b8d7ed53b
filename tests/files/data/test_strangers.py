"""Prepared directories that strangers made: whatever is in them is a line that says so, in bounded time and memory."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from damage import edit_json, huge, link, pipe
from mutations import bytes_of, json_of, spelled

from axonn_jax.core.errors import UserError
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare

ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("strangers")
    (root / "text").mkdir()
    for number in range(4):
        (root / "text" / f"{number}.txt").write_text("".join(f"line {n} of {number * n}\n" for n in range(60)))
    prepare(root / "text", root / "data", vocab=265, include=["*"], holdout=0.3, shard_tokens=1500)
    return root / "data"


@pytest.fixture
def data(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def read(folder):
    """What the commands do with a prepared directory; returns the one line of a refusal, if there is one."""
    began = time.monotonic()
    try:
        manifest = Manifest.load(folder)
        manifest.verify()
        tokenize.load(folder / "tokenizer.json").encode("line 7 of 49")
        said = ""
    except UserError as error:
        said = str(error)
    assert time.monotonic() - began < 10
    assert len(said.encode()) < 1000
    assert said.isprintable()
    return said


def rewrite(folder, change):
    edit_json(folder / "manifest.json", change)


def replaced(old, new):
    def change(folder):
        text = (folder / "manifest.json").read_text()
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new, 1))

    return change


def shard(**fields):
    return lambda folder: rewrite(folder, lambda raw: raw["splits"]["train"]["shards"][0].update(fields))


def top(**fields):
    return lambda folder: rewrite(folder, lambda raw: raw.update(fields))


MANIFESTS = {
    "deep": (lambda d: (d / "manifest.json").write_text(DEEP), "nested too deeply"),
    "deep inside": (replaced('"skipped": {}', f'"skipped": {DEEP}'), "nested too deeply"),
    "not finite": (replaced('"unigram_entropy": ', '"unigram_entropy": 1e999, "was": '), "1e999 is no finite"),
    "no number": (replaced('"unigram_entropy": ', '"unigram_entropy": NaN, "was": '), "NaN is no JSON"),
    "a number of 5000 digits": (replaced('"vocab": ', f'"vocab": {"9" * 5000}, "was": '), "4300"),
    "a large number": (top(vocab=10**30), "vocab = 1000000000000000000000000000000: an integer of at most 64 bits"),
    "a huge vocabulary": (top(vocab=1 << 40), f"vocab = {1 << 40}, not 1 to {1 << 20}"),
    "no vocabulary": (top(vocab=0), "vocab = 0"),
    "a vocabulary as text": (top(vocab="265"), "vocab = '265': an integer"),
    "an end that is no token": (top(eot_id=265), "eot_id = 265"),
    "a version that is a list": (top(version=[[]]), "version unknown"),
    "a list": (lambda d: (d / "manifest.json").write_text("[]"), "was not written by"),
    "a large file": (huge("manifest.json"), "more than the 16,777,216"),
    "a pipe": (pipe("manifest.json"), "not a regular file"),
    "no checksum": (shard(sha256=ESCAPES), "SHA-256"),
    "tokens below 0": (shard(tokens=-5), "without tokens"),
    "a shard above": (shard(name="../data/train-00000.bin"), "'../data/train-00000.bin', not 'train-00000.bin'"),
    "a shard elsewhere": (shard(name="/etc/passwd"), "'/etc/passwd', not"),
    "another's shard": (shard(name="valid-00000.bin"), "'valid-00000.bin', not"),
    "a name that steers": (shard(name=ESCAPES), r"\x1b]0;owned\x07\x1b[2J\u202e"),
    "a dtype that steers": (top(dtype=ESCAPES), r"\x1b]0;owned"),
    "a tokenizer's checksum": (top(tokenizer_sha256=7), "tokenizer_sha256 = 7: a text"),
    "a checksum with NUL": (top(tokenizer_sha256="\0"), "a text without NUL"),
    "no splits": (top(splits={"train": {}}), "splits['train'].bytes = (not given): required"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_strangers_manifest_is_a_line(data, case):
    damage, says = MANIFESTS[case]
    damage(data)
    said = read(data)
    assert says in said
    assert "Error" not in said


FILES = {
    "shard to a secret": (link("train-00000.bin", "/etc/passwd"), "train-00000.bin is not a regular file"),
    "shard to a device": (link("train-00000.bin", "/dev/zero"), "train-00000.bin is not a regular file"),
    "shard that is a pipe": (pipe("train-00000.bin"), "train-00000.bin is not a regular file"),
    "tokenizer to a secret": (link("tokenizer.json", "/etc/passwd"), "tokenizer.json is not a regular file"),
    "tokenizer to a device": (link("tokenizer.json", "/dev/zero"), "tokenizer.json is not a regular file"),
    "tokenizer that is a pipe": (pipe("tokenizer.json"), "tokenizer.json is not a regular file"),
    "tokenizer that is large": (huge("tokenizer.json"), "expected at most"),
}


@pytest.mark.parametrize("case", FILES)
def test_nothing_outside_is_read_and_nothing_waited_for(data, case):
    damage, says = FILES[case]
    damage(data)
    assert says in read(data)


@pytest.mark.parametrize("entry", ["0", "{}", pytest.param("[]", marks=pytest.mark.slow)])
def test_long_lists_take_bounded_time_and_memory(data, entry):
    replaced('"shards": [', '"shards": [' + f"{entry}," * 5_000_000)(data)
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
    program += "from axonn_jax.files.data.manifest import Manifest; Manifest.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, data], capture_output=True, text=True, timeout=60)
    assert "UserError: data.path" in done.stderr.splitlines()[-1]


TOKENIZERS = {
    "a merge of nothing": lambda raw: raw["model"]["merges"].append(["nowhere", "to be found"]),
    "a merge of three": lambda raw: raw["model"]["merges"].append(["l", "i", "n"]),
    "a number twice": lambda raw: raw["model"]["vocab"].update({"li": 5, "in": 5}),
    "a huge number": lambda raw: raw["model"]["vocab"].update({"li": 2**40}),
    "a number below 0": lambda raw: raw["model"]["vocab"].update({"li": -1}),
    "another model": lambda raw: raw["model"].update(type="Unigram"),
    "a vocabulary that is a list": lambda raw: raw["model"].update(vocab=[]),
    "no model": lambda raw: raw.pop("model"),
    "a token of many letters": lambda raw: raw["model"]["vocab"].update({"x" * 99999: "x"}),
    "a token that steers": lambda raw: raw["model"]["vocab"].update({ESCAPES: "x"}),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_strangers_tokenizer_is_a_line(data, case):
    edit_json(data / "tokenizer.json", TOKENIZERS[case])
    rewrite(data, lambda manifest: manifest.pop("tokenizer_sha256", None))
    assert "tokenizer.json of a directory from `axonn-jax prepare`, or a model's; this one is damaged (" in read(data)


def mutate(raw, chance):
    """The file with some bytes or, of JSON, one thing changed."""
    if chance.random() < 0.3:
        return bytes_of(chance, raw)[1]
    return spelled(json_of(chance, json.loads(raw))[1]).encode()


def test_mutations_of_every_file_are_taken_or_refused_in_a_line(prepared, tmp_path):
    chance, outcomes = random.Random(1), {"taken": 0, "refused": 0}
    for number in range(200):
        folder = Path(shutil.copytree(prepared, tmp_path / str(number)))
        name = chance.choice(["manifest.json", "manifest.json", "tokenizer.json", "train-00000.bin"])
        file = folder / name
        if name.endswith(".bin"):
            raw = bytearray(file.read_bytes())
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
            file.write_bytes(raw if chance.random() < 0.7 else raw[: chance.randrange(len(raw))])
        else:
            file.write_bytes(mutate(file.read_bytes(), chance))
        if name == "tokenizer.json" and chance.random() < 0.7:  # forged: its checksum is right
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            top(tokenizer_sha256=digest)(folder)
        outcomes["refused" if read(folder) else "taken"] += 1
        shutil.rmtree(folder)
    assert min(outcomes.values()) > 10, outcomes
