"""Instruction data of no use is one line that names the place, and nothing is written."""

import gzip
import json
import resource
import sys
from pathlib import Path

import instruction_data
import pytest

from axonn_jax.cli.main import main
from axonn_jax.files.data import read
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions

GOOD = {"instruction": "the grid", "output": "a mesh"}
NEEDED = ["--tokenizer", "tok", "--seq-len", "64"]
ALPACA = [*NEEDED, "--template", "alpaca"]


@pytest.fixture
def data(place):
    """A tokenizer with a chat template, and a good data.jsonl."""
    instruction_data.tokenizer(place / "tok")
    instruction_data.write(place / "data.jsonl", instruction_data.rows(20))
    return place


def refuse(refused, flags, *parts, source="data.jsonl"):
    refused(["prepare", "--instructions", source, "out", *flags], *parts)


ROWS = {
    "not JSON": ("{'instruction': 1}", "an object in JSON; Expecting property name"),
    "a list": ('["a", "b"]', "an object in JSON; this is a list"),
    "no response": (json.dumps({"instruction": "x"}), "an answer in one of completion, output, response, answer, "),
    "empty response": (json.dumps(GOOD | {"output": " "}), "a response: a text of"),
    "no question": (json.dumps({"output": "x"}), "a question in one of prompt, instruction, question, "),
    "unknown keys": (json.dumps({"instructions": "x", "outputs": "y"}), "'instructions'; did you mean 'instruction'?"),
    "empty": ("{}", "this row has no keys"),
    "a number": (json.dumps(GOOD | {"output": 3}), "a text in 'output'; this is int"),
    "messages of text": (json.dumps({"messages": ["hi"]}), 'a list of objects such as {"role": "user"'),
    "messages without content": (json.dumps({"messages": [{"role": "user"}]}), "texts both"),
    "only asked": (json.dumps({"messages": [{"role": "user", "content": "x"}]}), "a response: a text of"),
    "not in turns": (
        json.dumps({"messages": [{"role": role, "content": "x"} for role in ("user", "user", "assistant")]}),
        "messages of user and assistant in turns",
    ),
    "not UTF-8": ('{"prompt": "x", "completion": "\\ud800"}', "text that UTF-8 can express"),
}


@pytest.mark.parametrize("source", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("flags", [["--instructions", *NEEDED], ["--tokenizer", "tok"]], ids=["rows", "text"])
def test_a_line_too_long_to_read_is_named(data, refused, flags, source, monkeypatch):
    """A small file can hold a line of gigabytes: none is read to its end."""
    monkeypatch.setattr(read, "LONGEST", 1000)
    lines = [json.dumps(GOOD | {"text": "x"})] * 2 + [json.dumps(GOOD | {"text": "x" * 2000})]
    raw = "\n".join(lines).encode()
    path = data / f"long{source}"
    path.write_bytes(gzip.compress(raw) if source.endswith(".gz") else raw)
    refused(["prepare", path.name, "out", *flags], "SOURCE = ", f"{path.name}, line 3': lines of at most 1,000 bytes")


TEMPLATES = {
    "operator": "{{ '%1000000000d' % 1 }}",
    "filter": "{{ '%1000000000d'|format(1) }}",
    "padding": "{{ messages[0]['content'].ljust(1000000000) }}",
    "repeated": "{{ messages[0]['content'] * 1000000000 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_asks_for_gigabytes(data, refused, name):
    (data / "t.jinja").write_text(TEMPLATES[name])
    before = resource.getrlimit(resource.RLIMIT_AS)
    refuse(refused, [*NEEDED, "--template", "t.jinja"], "it asks for more than 512 MiB of memory")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("case", ROWS)
def test_a_row_of_no_use_names_its_line(data, refused, case):
    line, says = ROWS[case]
    (data / "data.jsonl").write_text("\n".join([json.dumps(GOOD | {"input": str(n)}) for n in range(16)] + [line, ""]))
    refuse(refused, ALPACA, "error: SOURCE = 'data.jsonl, line 17': ", says)
    (data / "more.jsonl").write_text(f"\n\n{line}\n")
    instruction_data.write(data / "data.jsonl", instruction_data.rows(4))
    refuse(refused, [*ALPACA, "--mix", "more.jsonl:2"], "error: --mix = 'more.jsonl, line 3': ", says)


FLAGS = {
    "no tokenizer": (["--seq-len", "64"], "--tokenizer = (not given): a tokenizer.json"),
    "no length": (["--tokenizer", "tok"], "--seq-len = (not given): the length of rows"),
    "a length": (["--tokenizer", "tok", "--seq-len", "1"], "--seq-len = 1: "),
    "a vocabulary": ([*NEEDED, "--vocab", "300"], "--vocab = 300: not given with --instructions"),
    "a field": ([*NEEDED, "--field", "code"], "--field = 'code': not given with --instructions"),
    "a template": ([*NEEDED, "--template", "alpacca"], "alpaca, chat or FILE.jinja; did you mean 'alpaca'?"),
    "no file": ([*NEEDED, "--template", "none.jinja"], "--template = 'none.jinja': a file in jinja that can be"),
    "no jinja": ([*NEEDED, "--template", "bad.jinja"], "--template = 'bad.jinja': a template in jinja; "),
    "no place": ([*NEEDED, "--template", "deaf.jinja"], "a place for the response; or --loss all; at data.jsonl, line"),
    "no turns": ([*NEEDED, "--template", "first.jinja"], "in whose text each answer can be found; or --loss all; at"),
    "no access": ([*NEEDED, "--template", "evil.jinja"], "data.jsonl, line 1': what the chat template takes; "),
    "no chat": (["--tokenizer", "plain", "--seq-len", "64", "--template", "chat"], "'plain' has none"),
    "a loss": ([*NEEDED, "--loss", "answers"], "--loss = 'answers': one of response, all"),
    "too long": ([*NEEDED, "--too-long", "keep"], "--too-long = 'keep': one of drop, cut"),
    "all too long": (["--tokenizer", "tok", "--seq-len", "9"], "--seq-len = 9: at least ", "or --too-long cut"),
    "all cut": (["--tokenizer", "tok", "--seq-len", "9", "--too-long", "cut"], "cut to a row, none has a target"),
    "weight zero": ([*NEEDED, "--mix", "data.jsonl:0"], "--mix = 'data.jsonl:0': FILE:WEIGHT with a weight above 0"),
    "a weight": ([*NEEDED, "--mix", "data.jsonl:x"], "--mix = 'data.jsonl:x': FILE:WEIGHT"),
    "weight nan": ([*NEEDED, "--mix", "data.jsonl:nan"], "--mix = 'data.jsonl:nan': FILE:WEIGHT"),
    "no weight": ([*NEEDED, "--mix", "data.jsonl"], "--mix = 'data.jsonl': FILE:WEIGHT"),
    "no mix": ([*NEEDED, "--mix", "none.jsonl:1"], "--mix = 'none.jsonl': a file with an object in JSON on each line"),
    "no begin": (["--tokenizer", "bare", "--seq-len", "64", "--bos"], "--bos = True: a --tokenizer whose"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_flags(data, refused, prepared, case):
    instruction_data.tokenizer(data / "plain", template=None)
    (data / "bare").symlink_to(prepared)
    (data / "bad.jinja").write_text("{% for %}")
    (data / "deaf.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    length = "{{ messages | map(attribute='content') | join | length }}"
    (data / "first.jinja").write_text(f"{length}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}")
    (data / "evil.jinja").write_text("{{ messages.append(1) }}{{ ''.__class__.__mro__ }}")
    flags, *says = FLAGS[case]
    refuse(refused, flags, *says)


SOURCES = {
    "none": (None, "a file with an object in JSON on each line"),
    "empty": ("", "at least two rows that differ"),
    "alike": (f"{json.dumps(GOOD)}\n" * 3, "at least two rows that differ"),
    "array": (json.dumps([GOOD, GOOD]), "line 1': an object in JSON; of one array `jq -c .[]` makes lines"),
    "lfs": ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sources(data, refused, case):
    content, says = SOURCES[case]
    (data / "data.jsonl").unlink()
    if content is not None:
        (data / "data.jsonl").write_text(content)
    refuse(refused, NEEDED, "error: SOURCE = 'data.jsonl", says)


@pytest.mark.parametrize("flag", ["--template=chat", "--seq-len=64", "--loss=all", "--too-long=cut", "--mix=a:1"])
def test_flags_of_instructions_alone(data, refused, flag):
    refused(["prepare", ".", "out", "--vocab", "300", flag], f"{flag.partition('=')[0]} = ", "without --instructions")


def test_without_jinja_alpaca_still_works(data, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refuse(refused, [*NEEDED, "--template", "chat"], "an installation with jinja2: pip install 'axonn_jax[hf]'")
    assert main(["prepare", "--instructions", "data.jsonl", "out", *ALPACA]) == 0


@pytest.fixture
def packed(data, write_config):
    """Rows of 16 tokens, and a configuration of a run on them."""
    rows = [{"prompt": f"the {n}", "completion": "a mesh"} for n in range(9)]
    instruction_data.write(data / "data.jsonl", rows)
    (data / "plain.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    options = InstructionOptions(16, template="plain.jinja")
    prepare_instructions(Path("data.jsonl"), Path("rows"), options, tokenizer=Path("tok"), holdout=0.3)
    return write_config


def test_rows_and_a_run_of_another_length(packed, refused):
    packed({"model": ["seq_len = 8"]}, data="rows")
    refused(["train", "run.toml"], "model.seq_len = 8: 16, the length of the rows in 'rows' (`prepare --seq-len`)")


def test_rows_that_were_changed(packed, place, refused):
    packed(data="rows")
    raw = json.loads((place / "rows" / "manifest.json").read_text())
    for changes, says in (
        ({"row": 16}, "no whole rows of 16 words in uint32"),
        ({"row": 0}, "kind = 'rows' with row = 0 in version 2"),
        ({"kind": "tokens"}, "kind = 'tokens' with row = 17 in version 2"),
        ({"version": 1}, "kind = 'rows' with row = 17 in version 1"),
        ({"version": 3}, "version 3; this axonn_jax reads 1 and 2"),
        ({"dtype": "uint16"}, "no whole rows of 17 words in uint32"),
    ):
        (place / "rows" / "manifest.json").write_text(json.dumps(raw | changes))
        refused(["train", "run.toml"], "data.path = 'rows'", says)


def test_loki_is_not_calibrated_on_rows(packed, run_dir, refused):
    packed(data="rows")
    refused(["loki", "run", "--data", "rows"], "--data = 'rows': a stream of text; this is rows")
