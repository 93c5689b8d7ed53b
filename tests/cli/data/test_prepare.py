import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from axonn_jax.cli import prepare as command
from axonn_jax.cli.arguments import parse
from axonn_jax.core.errors import UserError
from axonn_jax.files.data import prepare as preparing
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare, unigram_entropy

STDLIB_JSON = Path(sysconfig.get_paths()["stdlib"]) / "json"


def write_corpus(root: Path, files: int = 12) -> Path:
    root.mkdir()
    for number in range(files):
        folder = root / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        lines = [f"def function_{number}(value):\r\n    return value + {n} # né\n" for n in range(20)]
        (folder / f"module{number}.py").write_text("".join(lines), encoding="utf-8", newline="")
    return root


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def run_prepare(corpus, out, **changes):
    options = {"vocab": 300, "include": ["*.py"], "holdout": 0.2} | changes
    return prepare(corpus, out, **options)[0]


def stream(manifest, split):
    parts = [np.fromfile(manifest.path / s.name, manifest.storage) for s in manifest.splits[split].shards]
    return np.concatenate(parts)


def listing(folder):
    return sorted(os.listdir(folder))


def test_round_trip_is_exact_and_across_shards(corpus, tmp_path):
    (corpus / "tricky.py").write_bytes(
        "\ufeffx = '<|endoftext|>'\r\n\ttabs  \n\n\n日本語 🙂 no newline at end".encode()
    )
    manifest = run_prepare(corpus, tmp_path / "out", shard_tokens=1000)
    loaded = Manifest.load(tmp_path / "out")
    loaded.verify()
    assert loaded.as_json() == manifest.as_json()
    assert (loaded.dtype, loaded.storage) == ("uint16", np.dtype("<u2"))
    tokenizer = tokenize.load(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.get_vocab_size() == loaded.vocab == 300
    decoded = []
    for name, split in loaded.splits.items():
        tokens = stream(loaded, name)
        assert len(tokens) == split.tokens == sum(shard.tokens for shard in split.shards)
        assert all(shard.tokens == 1000 for shard in split.shards[:-1])
        assert 0 < split.shards[-1].tokens <= 1000
        ends = np.flatnonzero(tokens == loaded.eot_id)
        assert len(ends) == split.documents
        assert ends[-1] == len(tokens) - 1
        documents = [tokenizer.decode(part[:-1].tolist()).encode() for part in np.split(tokens, ends + 1)[:-1]]
        assert sum(map(len, documents)) == split.bytes
        decoded += documents
    assert sorted(decoded) == sorted(path.read_bytes() for path in corpus.rglob("*.py"))


def test_the_same_input_gives_the_same_bytes(corpus, tmp_path):
    run_prepare(corpus, tmp_path / "a")
    run_prepare(corpus, tmp_path / "b")
    assert listing(tmp_path / "a") == listing(tmp_path / "b")
    for name in listing(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_unigram_entropy_against_a_direct_sum(corpus, tmp_path):
    manifest = run_prepare(corpus, tmp_path / "out")
    counts = Counter(stream(manifest, "valid").tolist())
    total = sum(counts.values())
    direct = -sum(n / total * math.log(n / total) for n in counts.values())
    assert manifest.unigram_entropy == pytest.approx(direct, rel=1e-12)
    assert unigram_entropy(np.ones(64, np.int64)) == pytest.approx(math.log(64))
    assert unigram_entropy(np.array([0, 5, 0])) == 0.0


def test_what_is_not_text_is_skipped_and_counted(corpus, tmp_path):
    plain = run_prepare(corpus, tmp_path / "plain")
    (corpus / "binary.py").write_bytes(b"text\0more")
    (corpus / "latin.py").write_bytes(b"caf\xe9 \n")
    (corpus / "empty.py").write_bytes(b"")
    (tmp_path / "outside.py").write_text("secret = 1\n" * 100)
    (corpus / "link.py").symlink_to(tmp_path / "outside.py")
    (corpus / "around").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(corpus / "pipe.py")
    (corpus / "site-packages").mkdir()
    (corpus / "site-packages" / "other.py").write_text("left out")
    (corpus / "picture.png").write_bytes(b"\0")
    manifest, source = prepare(
        corpus, tmp_path / "out", vocab=300, include=["*.py"], exclude=["site-packages"], holdout=0.2
    )
    assert dict(manifest.skipped) == {
        "binary": 1,
        "empty": 1,
        "not_utf8": 1,
        "not_included": 1,
        "symlink": 2,
        "unreadable": 1,
    }
    assert source.examples["binary"] == "binary.py"
    assert dict(source.not_included) == {".png": 1}
    assert manifest.splits == plain.splits


def test_an_output_below_the_source_is_not_read_again(corpus):
    first = run_prepare(corpus, corpus / "out", include=["*"])
    (corpus / ".out.12345678.partial").mkdir()
    (corpus / ".out.12345678.partial" / "train-00000.bin").write_text("left over")
    again = run_prepare(corpus, corpus / "out", include=["*"], force=True)
    assert again.as_json() == first.as_json()
    assert not any(name.endswith(".old") for name in listing(corpus))


def test_patterns_with_a_slash_are_for_the_path(corpus, tmp_path):
    manifest = run_prepare(corpus, tmp_path / "out", include=["part0/*", "part1/*.py"], exclude=["part1/*7.py"])
    assert sum(split.documents for split in manifest.splits.values()) == 7


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError("disk full")])
@pytest.mark.parametrize("phase", ["reading", "counting words", "encoding"])
def test_an_interrupted_prepare_leaves_nothing(corpus, tmp_path, interruption, phase):
    def report(name, done, total):
        if name == phase:
            raise interruption

    before = listing(tmp_path)
    with pytest.raises((KeyboardInterrupt, SystemExit, OSError)):
        run_prepare(corpus, tmp_path / "out", report=report)
    assert listing(tmp_path) == before
    run_prepare(corpus, tmp_path / "out")
    kept = (tmp_path / "out" / "manifest.json").read_bytes()
    with pytest.raises((KeyboardInterrupt, SystemExit, OSError)):
        run_prepare(corpus, tmp_path / "out", force=True, report=report, seed=5)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == kept
    assert listing(tmp_path) == sorted([*before, "out"])


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_signal_cleans_up(corpus, tmp_path, monkeypatch, number):
    monkeypatch.setattr(preparing, "_encode", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught:
        command.run(command.Prepare(corpus, tmp_path / "out", vocab=300))
    assert caught.value.code == 128 + number
    assert listing(tmp_path) == ["corpus"]
    assert signal.getsignal(number) is before


def test_more_shards_than_a_manifest_takes_are_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "MAX_SHARDS", 3)
    with pytest.raises(UserError, match=r"^--shard-tokens = 100: more tokens: at most 3 shards"):
        run_prepare(corpus, tmp_path / "out", shard_tokens=100)
    assert listing(tmp_path) == ["corpus"]


def test_names_of_files_and_directories_cannot_steer_a_terminal(corpus, tmp_path):
    (corpus / "\x1b]0;owned\x07\x1b[2J.py").write_bytes(b"\0")
    (corpus / os.fsdecode(b"\xff\x1b[2J.py")).write_bytes(b"caf\xe9")
    command = [sys.executable, "-m", "axonn_jax.cli.main", "prepare", corpus, bytes(tmp_path) + b"/out\xff\x1b[2J"]
    done = subprocess.run([*command, "--vocab", "300"], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
    assert b"skipped 1 binary" in done.stderr
    assert b"out\\udcff\\x1b[2J written in" in done.stdout


def test_a_file_that_changes_meanwhile_is_an_error(corpus, tmp_path):
    def report(name, done, total):
        if name == "learning merges":
            for path in corpus.rglob("*.py"):
                path.write_bytes(b"\xff")

    with pytest.raises(UserError, match=r"SOURCE = .*changed"):
        run_prepare(corpus, tmp_path / "out", report=report)
    assert not (tmp_path / "out").exists()


def test_only_a_prepared_directory_is_replaced_and_only_with_force(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run_prepare(corpus, out)  # an empty directory will do
    with pytest.raises(UserError, match=r"OUT_DIR = .*--force"):
        run_prepare(corpus, out)
    run_prepare(corpus, out, force=True, seed=3)
    assert Manifest.load(out).options["seed"] == 3
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"OUT_DIR = .*'notes.txt'"):
        run_prepare(corpus, out, force=True)
    assert (out / "notes.txt").read_text() == "mine"
    for place in (corpus, tmp_path):
        with pytest.raises(UserError, match="other than SOURCE"):
            run_prepare(corpus, place, force=True)
    with pytest.raises(UserError, match="OUT_DIR"):
        run_prepare(corpus, out / "notes.txt")


def test_large_vocabularies_take_four_bytes(corpus, tmp_path, monkeypatch):
    train = tokenize.train
    monkeypatch.setattr(tokenize, "train", lambda texts, vocab: train(texts, 300))
    manifest = run_prepare(corpus, tmp_path / "out", vocab=65536)
    assert manifest.dtype == "uint32"
    assert len(stream(manifest, "train")) == manifest.splits["train"].tokens
    assert Manifest.load(tmp_path / "out").storage == np.dtype("<u4")


def run_command(*arguments):
    return command.run(parse(command.Prepare, [str(a) for a in arguments], "prepare"))


def test_the_command_prints_one_json_object(tmp_path, capsys):
    arguments = (STDLIB_JSON, tmp_path / "out", "--vocab", "512", "--include", "*.py", "--json")
    assert run_command(*arguments) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["vocab"] == 512
    assert result["splits"]["valid"]["documents"] >= 1
    assert result["splits"]["train"]["shards"] == 1
    assert 3 < result["unigram_entropy"] < math.log(512)
    assert captured.err == ""  # a quick one says nothing on the way
    manifest = Manifest.load(tmp_path / "out")
    tokenizer = tokenize.load(tmp_path / "out" / "tokenizer.json")
    text = (STDLIB_JSON / "scanner.py").read_text(encoding="utf-8")
    assert text in tokenizer.decode(stream(manifest, "train").tolist() + stream(manifest, "valid").tolist())


def test_the_command_prints_a_summary_and_what_it_skipped(corpus, tmp_path, capsys):
    (corpus / "binary.md").write_bytes(b"\0")
    assert run_command(corpus, tmp_path / "out", "--vocab", "300", "--exclude", "part0", "--exclude", "*7*") == 0
    captured = capsys.readouterr()
    assert "unigram entropy" in captured.out
    assert "skipped 1 binary, such as 'binary.md'" in captured.err
    assert sum(split.documents for split in Manifest.load(tmp_path / "out").splits.values()) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": Path("/none/here")}, r"SOURCE = '/none/here'"),
        ({"include": ("*.nothing",)}, r"--include = '\*\.nothing'.*match"),
        ({"vocab": 256}, r"--vocab = 256: .*from 257"),
        ({"vocab": -5}, r"--vocab = -5"),
        ({"vocab": 1 << 40}, r"--vocab = 1099511627776"),
        ({"vocab": 50_000}, r"--vocab = 50000: at most \d+"),
        ({"holdout": -0.1}, r"--holdout = -0\.1: .*below 1"),
        ({"holdout": 1.0}, r"--holdout = 1"),
        ({"holdout": math.nan}, r"--holdout = nan"),
        ({"seed": -1}, r"--seed = -1"),
        ({"shard_tokens": 0}, r"--shard-tokens = 0"),
        ({"out": Path("/proc/none")}, r"OUT_DIR = '/proc/none'.*written"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(corpus, tmp_path, change, message):
    arguments = command.Prepare(corpus, tmp_path / "out", vocab=300)
    with pytest.raises(UserError, match="^" + message) as caught:
        command.run(replace(arguments, **change))
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == ["corpus"]
