"""What `axonn-jax generate` refuses before jax starts, and what it shows on a terminal."""

import io
import json
import os
import re
import subprocess
import sys
import types

import pytest
from damage import edit_json, pipe

from axonn_jax.cli.main import main
from axonn_jax.core.distributed import initialize
from axonn_jax.core.errors import UserError
from axonn_jax.files.data.prompts import prompt_ids
from axonn_jax.files.data.tokenize import load
from axonn_jax.text.inference.texts import TextPart

TOKENIZERS = {
    "missing": (lambda file: file.unlink(), "No such file"),
    "empty": (lambda file: file.write_text(""), "is damaged"),
    "cut off": (lambda file: os.truncate(file, 999), "is damaged"),
    "deep": (lambda file: file.write_text("[" * 100_000), "nested too deeply"),
    "a pipe": (lambda file: pipe(file.name)(file.parent), "not a regular file"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_of_no_use_is_found_before_jax_starts(run_dir, refused, case):
    damage, says = TOKENIZERS[case]
    damage(run_dir / "tokenizer.json")
    refused(["generate", "run", "--prompt", "x"], "RUN_DIR = 'run", says)


def test_a_prompt_of_no_use_is_found_before_jax_starts(run_dir, refused):
    refused(["generate", "run", "--prompt", os.fsdecode(b"caf\xe9")], r"--prompt = 'caf\udce9': a text in UTF-8")


def test_an_empty_prompt_begins_a_document_where_the_tokenizer_is_ours(run_dir, refused):
    assert prompt_ids(load(run_dir / "tokenizer.json"), "") == [0]
    other = {"add_prefix_space": True, "use_regex": False}
    edit_json(run_dir / "tokenizer.json", lambda raw: raw["pre_tokenizer"].update(other))
    refused(["generate", "run", "--prompt", ""], "--prompt = '': a text of at least one token")


def test_a_prompt_that_is_not_utf8_as_a_shell_gives_it(run_dir):
    command = [sys.executable, "-m", "axonn_jax.cli.main", "generate", "run", "--prompt", b"caf\xe9 \x1b[2J"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    line = "error: --prompt = 'caf\\udce9 \\x1b[2J': a text in UTF-8\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def writing(monkeypatch, *parts):
    """Puts a generator that gives these (text's number, piece, whether it ends) in the place of the real one."""

    def write(*_, **__):
        for request, text, ended in parts:
            if isinstance(text, Exception):
                raise text
            yield TextPart(request, text, [1, 2], [-0.5, -1.5], ended)

    grid = types.SimpleNamespace(rank=0)
    monkeypatch.setattr(
        "axonn_jax.text.inference.generator.Generator", lambda *_, **__: types.SimpleNamespace(grid=grid)
    )
    monkeypatch.setattr("axonn_jax.text.inference.texts.write", write)
    monkeypatch.setattr(initialize, "start", lambda *_: (None, grid))


def told(monkeypatch, stream, pieces):
    """What a generator that gives these pieces writes to a stream."""
    writing(monkeypatch, *((0, text, at == len(pieces) - 1) for at, text in enumerate(pieces)))
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


def prompts(folder, *texts):
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return ["generate", "run", "--prompts", "prompts.jsonl"]


SHUFFLED = [(2, "C", False), (1, "B", True), (0, "A", False), (2, "c", True), (0, "a", True), (3, "D", True)]


def test_texts_are_printed_whole_and_in_their_order(run_dir, place, monkeypatch, capsys):
    writing(monkeypatch, *SHUFFLED)
    words = [*prompts(place, "say ", "\u00e9"), "--samples", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out == "say Aa\n\nsay B\n\n\u00e9Cc\n\n\u00e9D\n\n"
    assert main([*words, "--json", "--logprobs"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["prompt"], one["sample"], one["text"]) for one in found] == [
        ("say ", 0, "Aa"), ("say ", 1, "B"), ("\u00e9", 0, "Cc"), ("\u00e9", 1, "D"),
    ]  # fmt: skip
    assert [one["logprobs"] for one in found] == [[-0.5, -1.5] * len(one["text"]) for one in found]
    assert [one["ids"] for one in found] == [[1, 2] * len(one["text"]) for one in found]


@pytest.fixture
def piped():
    """A pipe's number, with these bytes in it; standard input comes from it too."""
    before, ends = os.dup(0), []

    def write(raw):
        reading, writing_end = os.pipe()
        os.write(writing_end, raw)
        os.close(writing_end)
        os.dup2(reading, 0)
        ends.append(reading)
        return reading

    yield write
    os.dup2(before, 0)
    for end in (before, *ends):
        os.close(end)


@pytest.mark.parametrize("name", ["-", "/dev/fd/{}", "/dev/stdin"])
def test_prompts_from_a_pipe_and_what_else_their_lines_hold(run_dir, piped, monkeypatch, capsys, name):
    lines = [{"id": "a/7", "prompt": "say ", "sample": None, "meta": {"n": [1]}}, {"prompt": "\u00e9"}]
    end = piped("".join(json.dumps(line) + "\n" for line in lines).encode())
    writing(monkeypatch, *SHUFFLED)
    assert main(["generate", "run", "--prompts", name.format(end), "--samples", "2", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made = [{"sample": n % 2, "text": text} for n, text in enumerate(["Aa", "B", "Cc", "D"])]
    assert found == [lines[n // 2] | own for n, own in enumerate(made)]


def test_an_empty_standard_input(run_dir, piped, refused):
    piped(b"")
    refused(["generate", "run", "--prompts", "-"], "--prompts = '-': at least one line; with several processes only")


def test_the_speed_leaves_out_what_came_with_compilation(run_dir, place, monkeypatch, capsys):
    writing(monkeypatch, (0, "a", False), (0, "b", True))
    assert main(["generate", "run", "--prompt", "x"]) == 0
    line = r"4 tokens in \d+\.\d s with prompts and compilation; the last 2: [\d,.]+ tokens/s\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    writing(monkeypatch, (0, "a", True), (1, "b", True))
    assert main(prompts(place, "x", "y")) == 0
    assert re.fullmatch(r"4 tokens in \d+\.\d s with prompts and compilation\n", capsys.readouterr().err)


def test_a_prompt_is_not_printed_before_an_error(run_dir, monkeypatch, capsys):
    writing(monkeypatch, (0, UserError("model", "its weights", "finite ones"), True))
    assert main(["generate", "run", "--prompt", "x"]) == 2
    assert capsys.readouterr() == ("", "error: model = 'its weights': finite ones\n")
