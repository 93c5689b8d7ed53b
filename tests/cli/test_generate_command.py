"""What `axonn-jax generate` refuses before jax starts, and what it shows on a terminal."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest

from axonn_jax.cli.main import main
from axonn_jax.distributed import initialize


@pytest.fixture
def run_dir(prepared, place, write_config, monkeypatch):
    """The directory of a run as far as a refusal reads it; jax must not be started."""
    write_config({"model": ["vocab = 300"]})
    (place / "run").mkdir()
    (place / "run.toml").rename(place / "run" / "config.toml")
    shutil.copyfile(prepared / "tokenizer.json", place / "run" / "tokenizer.json")
    monkeypatch.setattr(initialize, "start", lambda *_: pytest.fail("jax was started"))
    return place / "run"


def change(act):
    def damage(file):
        raw = json.loads(file.read_text())
        act(raw["model"])
        file.write_text(json.dumps(raw))

    return damage


TOKENIZERS = {
    "missing": (lambda file: file.unlink(), "No such file"),
    "empty": (lambda file: file.write_text(""), "is damaged"),
    "cut off": (lambda file: os.truncate(file, 999), "is damaged"),
    "deep": (lambda file: file.write_text("[" * 100_000), "nested too deeply"),
    "a pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
    "larger than the model": (change(lambda model: model["vocab"].update({"xyz": 300})), "at most model.vocab = 300"),
    "without a byte": (change(lambda model: model["vocab"].update({"xyz": model["vocab"].pop("~")})), "a byte is"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_of_no_use_is_found_before_jax_starts(run_dir, refused, case):
    damage, says = TOKENIZERS[case]
    damage(run_dir / "tokenizer.json")
    refused(["generate", "run", "--prompt", "x"], "RUN_DIR = 'run", says)


def test_a_prompt_of_no_use_is_found_before_jax_starts(run_dir, refused):
    refused(["generate", "run", "--prompt", ""], "--prompt = '': a text of at least one token")
    refused(["generate", "run", "--prompt", os.fsdecode(b"caf\xe9")], r"--prompt = 'caf\udce9': a text in UTF-8")


def test_a_prompt_that_is_not_utf8_as_a_shell_gives_it(run_dir):
    command = [sys.executable, "-m", "axonn_jax.cli.main", "generate", "run", "--prompt", b"caf\xe9 \x1b[2J"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    line = "error: --prompt = 'caf\\udce9 \\x1b[2J': a text in UTF-8\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def told(monkeypatch, stream, pieces):
    """What a generator that gives these pieces writes to a stream."""

    class Told:
        def __init__(self, *_):
            pass

        def continue_prompt(self, prompt, **_):
            return iter(pieces)

    monkeypatch.setattr("axonn_jax.inference.texts.Generator", Told)
    monkeypatch.setattr(initialize, "start", lambda *_: (None, None))
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["generate", "run", "--prompt", "say "]) == 0
    stream.flush()


TEXT = "\u00e9\x1b[2J\r\u202e\tend\n"


def test_on_a_terminal_a_models_text_cannot_steer_it(run_dir, monkeypatch):
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as terminal:
        told(monkeypatch, terminal, [TEXT[:3], TEXT[3:]])
        shown = ""
        while not shown.endswith("end\r\n\r\n"):  # a terminal passes on a piece at a time
            shown += os.read(master, 1000).decode()
    os.close(master)
    assert shown.replace("\r\n", "\n") == "say \u00e9\\x1b[2J\\r\\u202e\tend\n\n"


def test_in_a_pipe_a_models_text_is_as_it_is(run_dir, monkeypatch):
    pipe = io.BytesIO()
    told(monkeypatch, io.TextIOWrapper(pipe, encoding="utf-8", newline=""), [TEXT])
    assert pipe.getvalue().decode() == f"say {TEXT}\n"
