"""Configs, machine files and timelines from strangers: one line within seconds, nothing followed out of a directory."""

import json
import os
import random
import re
import time
from pathlib import Path
from typing import Annotated, get_origin, get_type_hints

import pytest

from axonn_jax.cli.main import main
from axonn_jax.core.documents import _without_texts, parse_json
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape, divisors
from axonn_jax.core.models.config import ModelShape
from axonn_jax.pipe.schedule.partition import SegmentCost, partition
from axonn_jax.pipe.timeline.spans import Span, steps_of
from axonn_jax.pipe.timeline.trace import MOST_RANKS, read_trace, write_trace

EVENT = {"ph": "X", "pid": 0, "tid": 0, "name": "F0.0", "cat": "forward", "ts": 0.0, "dur": 1.0, "args": {"step": 1}}
HINTS = get_type_hints(ModelShape, include_extras=True)
MOST = {
    field: hint.__metadata__[0].high
    for field, hint in HINTS.items()
    if get_origin(hint) is Annotated and "at least" in hint.__metadata__[0].accepted and hint.__origin__ is int
}
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64, "seq_len": 64}


def trace(*events):
    lines = ",\n".join(event if isinstance(event, str) else json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


@pytest.fixture
def quick():
    start = time.process_time()
    yield
    assert time.process_time() - start < 10


FILES = {
    "thousands of digits": ("[train]\nlr = 0x" + "f" * 9000, "train.lr = (too large to show): a number"),
    "a line of a megabyte": ("[log]\ndir = " + json.dumps("x" * 900_000), "a line of over 10,000 characters"),
    "a key of hundreds of parts": (".".join("a" * 250) + " = 1", "not a known table"),
    "a key of thousands of parts": (
        "[log]\n" + ".".join("a" * 4900) + " = 1",
        "a line of over 10,000 characters or 250 points, which is 2",
    ),
    "a key of a million parts": (".".join("a" * 499_000) + " = 1", "a line of over 10,000 characters"),
    "megabytes": ("# nothing\n" * 200_000, "2,000,000 bytes, more than the 1,000,000 that are read"),
    "lists in lists": ("a = " + "[" * 4000 + "]" * 4000, "valid TOML; nested too deeply"),
    "a text that steers": ('[train]\noptimizer = "\\u001b[2J\\u202e"', "train.optimizer = '\\x1b[2J\\u202e': one of"),
}


@pytest.mark.parametrize("case", FILES)
def test_configs(place, refused, quick, case):
    text, says = FILES[case]
    (place / "run.toml").write_text(text)
    refused(["train", "run.toml"], says)


@pytest.mark.parametrize("kind", ["pipe", "endless", "huge"])
def test_what_is_no_file(place, capsys, quick, kind):
    """As a config, a machine file and a timeline: nobody waits for a pipe, nor reads without an end."""
    (place / "run").mkdir()
    for name in ("run.toml", "run/timeline.json", "run/config.toml"):
        if kind == "pipe":
            os.mkfifo(place / name)
        elif kind == "endless":
            (place / name).symlink_to("/dev/zero")
        else:
            (place / name).touch()
            os.truncate(place / name, 1 << 40)
    plan = ["--model", "gpt2", "--devices", "8", "--batch-tokens", "65536", "--machine", "run.toml"]
    for argv in (
        ["train", "run.toml"],
        ["plan", *plan],
        ["simulate", *plan],
        ["timeline", "run"],
        ["generate", "run", "--prompt", "x"],
    ):
        assert main(argv) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "not a regular file" in err or "bytes, more than" in err or argv[0] == "generate"


@pytest.mark.parametrize("field", MOST)
def test_sizes_beyond_any_model(quick, field):
    for size in (MOST[field] + 1, 10**13, 10**400):
        with pytest.raises(UserError, match=rf"^model.{field} = .* at least [01] and at most {MOST[field]:,}$"):
            ModelShape(**{**SHAPE, field: size})


def test_the_largest_sizes_are_checked_in_time(quick):
    sizes = {field: most for field, most in MOST.items() if field not in ("head_dim", "score_dim")}
    shape = ModelShape(**{**SHAPE, **sizes, "heads": 64, "kv_heads": 64})
    with pytest.raises(UserError, match=r"a divisor of hidden \(1048576\); the nearest is 64$"):
        ModelShape(**{**SHAPE, **sizes, "heads": 65})
    with pytest.raises(UserError, match=r"grid.y one of 1, 2, 4, 8, 16, 32, 64"):
        shape.check_grid(GridShape(y=3))
    with pytest.raises(UserError, match=r"^grid.pipe = 10{12}: an integer of at least 1 and at most 1,048,576$"):
        GridShape(pipe=10**12)
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


@pytest.mark.parametrize(("pipe", "virtual"), [(2, 1), (9000, 2)])
def test_a_very_long_model_is_cut_in_time(quick, pipe, virtual):
    costs = [SegmentCost("piece", 1.0, 2.0, 10)] * 20_001
    parts = partition(costs, pipe, virtual)
    assert [place for part in parts for place in part] == list(range(20_001))
    sizes = [sum(len(part) for part in parts[rank::pipe]) for rank in range(pipe)]
    assert max(sizes) <= min(sizes) * 1.02 + 2


BAD_EVENTS = {
    "a process beyond any pipeline": (EVENT | {"pid": 10**15}, "a pid that is none of at most 1,024 stages"),
    "a number without an end": (json.dumps(EVENT).replace("1.0", "1e999"), "1e999 is no finite number"),
    "NaN": (json.dumps(EVENT).replace("1.0", "NaN"), "NaN is no JSON"),
    "a step of hundreds of digits": (EVENT | {"args": {"step": 10**300}}, "an event of no task's kind, time or step"),
    "ages": (EVENT | {"dur": 1e300}, "an event of no task's kind, time or step"),
    "a long line": (EVENT | {"name": "x" * 5000}, "an event of over 1,000 characters"),
    "a name that steers": (EVENT | {"cat": "\x1b[2J\u202e"}, "an event of no task's kind"),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_timelines(place, refused, quick, case):
    event, says = BAD_EVENTS[case]
    (place / "run").mkdir()
    (place / "run" / "timeline.json").write_text(trace(event))
    refused(
        ["timeline", "run"], "timeline.json = 'run/timeline.json': a whole trace as a pipelined run leaves it", says
    )


def test_many_spans_are_refused(place, refused, quick):
    (place / "run").mkdir()
    (place / "run" / "timeline.json").write_text(trace(*[json.dumps(EVENT)] * 501_000))
    refused(["timeline", "run"], "more than 500,000 spans")


def test_of_more_spans_than_are_read_the_oldest_steps_are_left_out(place, monkeypatch):
    monkeypatch.setattr("axonn_jax.pipe.timeline.trace._MOST_SPANS", 5)
    spans = [Span(0, f"F0.{number}", "forward", step + number, step + number + 0.5, step)
             for step in (1, 4, 8) for number in range(2)]  # fmt: skip
    write_trace(place / "timeline.json", spans)
    assert steps_of(read_trace(place / "timeline.json")) == [4, 8]


@pytest.mark.slow
def test_the_widest_pipeline_is_drawn(place, capsys):
    (place / "run").mkdir()
    spans = [Span(rank, f"F{rank}.0", "forward", rank / 1e3, rank / 1e3 + 1, 1) for rank in (0, 1, 2, MOST_RANKS - 1)]
    write_trace(place / "run" / "timeline.json", spans)
    start = time.process_time()
    assert main(["timeline", "run", "--json"]) == 0
    assert time.process_time() - start < 15
    assert len(json.loads(capsys.readouterr().out)["stages"]) == MOST_RANKS


def test_a_picture_replaces_a_link(place, capsys):
    """A link that came with a run directory does not decide which file is written."""
    (place / "run").mkdir()
    write_trace(place / "run" / "timeline.json", [Span(0, "F0.0", "forward", 0.0, 1.0, 1)])
    (place / "mine.txt").write_text("mine")
    for name in ("timeline.png", ".timeline.png.part", ".timeline.json.part"):
        (place / "run" / name).symlink_to(place / "mine.txt")
    assert main(["timeline", "run"]) == 0
    write_trace(place / "run" / "timeline.json", [Span(0, "F0.0", "forward", 0.0, 1.0, 1)])
    assert (place / "mine.txt").read_text() == "mine"
    assert (place / "run" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert not (place / "run" / "timeline.png").is_symlink()
    assert len(list((place / "run").iterdir())) == 2


@pytest.mark.parametrize("unit", ["[[],[[],[]]],", "[" * 60 + "]" * 60 + ",", '{"a":{"b":{}}},', "300," * 30])
def test_lists_in_lists_that_would_take_gigabytes_are_not_parsed(unit):
    """Of 49.5 MB of such lists in a tokenizer came 10 GB."""
    with pytest.raises(ValueError, match=r"take about \d+\.\d GB once they are read, more than 1\.1 GB"):
        parse_json(b"[" + unit.encode() * (70_000_000 // len(unit)) + b"0]")


def test_brackets_in_texts_are_no_lists(monkeypatch):
    text = json.dumps({"code": '[{,"\\' * 1_200_000})
    assert parse_json(text.encode()) == json.loads(text)
    monkeypatch.setattr("axonn_jax.core.documents._PIECE", 7)
    drawn, parts = random.Random(0), ('"', "\\", "[", "{", ",", "a", '\\"')
    for _ in range(300):
        value = ["".join(drawn.choices(parts, k=drawn.randrange(9))) for _ in range(5)] + [{}, [1, {"[": "\\"}]]
        raw = json.dumps(value).encode()
        assert re.sub(rb"[^]{},[]", b"", b"".join(_without_texts(raw))) == b"[,,,,,{},[,{}]]"


def test_machine_files(place, refused, quick):
    text = (Path(__file__).parents[2] / "axonn_jax" / "planning" / "machines" / "perlmutter.toml").read_text()
    row = "\n[[matmuls]]\nsize = {}\nshare = 0.5\n"
    many = "".join(row.format(size) for size in range(1, 2_000))
    for changed, says in (
        (text.replace("devices = 4", "devices = " + "9" * 400), "node.devices = 999"),
        (text.replace("devices = 4", "devices = 0x" + "f" * 9000), "node.devices = (too large to show): an integer"),
        (text.replace("[node]", "[node]\nat_once = 1e308"), "node.at_once = 1e+308: a finite number of at least 0"),
        (text.replace("[node]", "[node]\nat_once = 5e-324"), "node.at_once = 5e-324: a finite number of at least 0"),
        (text + "\nx = " + "[" * 4000 + "]" * 4000, "valid TOML; nested too deeply"),
        (text + many + row.format(7), "matmuls = (7,): one entry for each size"),
    ):
        (place / "machine.toml").write_text(changed)
        refused(
            ["plan", "--model", "gpt2", "--devices", "8", "--batch-tokens", "65536", "--machine", "machine.toml"], says
        )
