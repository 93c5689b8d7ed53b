"""Trackers: what metrics.jsonl and TensorBoard keep over a resume, and that others are told of each step once."""

import contextlib
import importlib
import json
import math
import os
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest
from launched import flags, write_config

import axonn_jax as ax
from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.orbax import OrbaxWriter
from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import say
from axonn_jax.run.tracking.files import FACTS, TensorBoard, start_trackers
from axonn_jax.run.tracking.records import JsonLines, read_metrics
from axonn_jax.run.tracking.tracker import RunFacts, RunTracker, Trackers, tracker_class


def test_each_record_is_a_line_at_once_and_json(tmp_path):
    log = JsonLines()
    log.start(RunFacts(tmp_path, "id"))
    log.log(1, {"loss": 2.5, "picture": tmp_path / "loss.png", "samples": [{"text": "not here"}]})
    log.log(1, {"samples": []})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5}
    log.log(2, {"loss": math.nan})
    log.finish()
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": None}


def logged(folder, *records, made=JsonLines, resumed=0, **options):
    log = made(**options)
    log.start(RunFacts(folder, "id", resumed=resumed))
    for record in records:
        log.log(record.pop("step"), record)
    log.finish(0)


def test_an_earlier_runs_metrics_are_kept(tmp_path):
    for value in (1.0, 2.0, 3.0):
        logged(tmp_path, {"step": 1, "loss": value})
    assert read_metrics(tmp_path)[0]["loss"] == 3.0
    assert json.loads((tmp_path / "metrics.1.jsonl").read_text())["loss"] == 1.0
    assert json.loads((tmp_path / "metrics.2.jsonl").read_text())["loss"] == 2.0


def shown(folder):
    """Steps of the losses that TensorBoard shows: a session's start drops what came before from its step on."""
    from tensorboardX.proto.event_pb2 import Event

    steps = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        raw = path.read_bytes()
        while raw:
            (size,) = struct.unpack("<Q", raw[:8])
            event, raw = Event.FromString(raw[12 : 12 + size]), raw[16 + size :]
            if event.session_log.status == event.session_log.START and event.HasField("session_log"):
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == "loss"]
    return steps


def test_tensorboard_shows_a_resumed_runs_steps_once_and_no_other_runs(tmp_path):
    for first, resumed in ((1, 0), (4, 3), (1, 0)):
        records = ({"step": step, "loss": 1.0 / step} for step in range(first, first + 5))
        logged(tmp_path, *records, made=TensorBoard, resumed=resumed)
    assert shown(tmp_path / "tensorboard.1") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert shown(tmp_path / "tensorboard") == [1, 2, 3, 4, 5]


DAMAGES = {
    "a number": b"12\n",
    "not UTF-8": b"\xff\xfe\x00\n",
    "no step": b'{"loss": 1.0}\n',
    "a step that is none": b'{"step": true, "loss": 1.0}\n',
    "a step below 0": b'{"step": -5, "eval_loss": 0.0}\n',
    "not finite": b'{"step": 3, "loss": 1e999}\n',
    "deep": b"[" * 200_000 + b"\n",
    "a list": b'["step"]\n',
    "half a line": b'"step": 2}\n',
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at", ["middle", "end"])
def test_a_run_goes_on_with_the_lines_that_can_be_read(damage, at, tmp_path):
    lines = [b'{"step": 1, "loss": 2.0}\n', b'{"step": 2, "loss": 1.0}\n']
    lines.insert(1 if at == "middle" else 2, DAMAGES[damage])
    path, told = tmp_path / "metrics.jsonl", []
    path.write_bytes(b"".join(lines))
    logged(tmp_path, {"step": 3, "loss": 0.5}, resumed=2, warn=told.append)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == b"".join(lines), "nothing of a user's is lost"
    (line,) = told
    assert "metrics.jsonl is damaged and kept as metrics.1.jsonl; lines left out: 1, the first line " in line


@pytest.mark.parametrize("kind", ["directory", "pipe", "dangling link"])
def test_what_is_no_log_is_kept_under_another_name(kind, tmp_path):
    path, told = tmp_path / "metrics.jsonl", []
    if kind == "directory":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    logged(tmp_path, {"step": 3, "loss": 0.5}, resumed=2, warn=told.append)
    assert [record["step"] for record in read_metrics(tmp_path)] == [3]
    assert (tmp_path / "metrics.1.jsonl").is_symlink() or (tmp_path / "metrics.1.jsonl").exists()
    assert kind != "directory" or (tmp_path / "metrics.1.jsonl/notes.txt").read_text() == "mine"
    assert len(told) == 1


def test_a_line_cut_off_by_a_kill_is_left_out_and_no_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    told = []
    logged(tmp_path, resumed=1, warn=told.append)
    assert not told
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


NOTHING = {
    "missing": (None, "is missing: there is no record up to step 2"),
    "empty": ("", "has no record up to step 2"),
    "of later steps alone": ('{"step": 3, "loss": 1.0}\n', "has no record up to step 2"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_a_run_that_goes_on_without_its_metrics_says_so(case, tmp_path):
    (content, says), told = NOTHING[case], []
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    logged(tmp_path, {"step": 3, "loss": 0.5}, resumed=2, warn=told.append)
    assert told == [f"note: {tmp_path / 'metrics.jsonl'} {says}; the lowest held-out loss counts from here on"]
    logged(tmp_path, resumed=2, name="samples.jsonl", warn=told.append)  # which a run may have begun to write since
    assert len(told) == 1


def test_a_step_that_is_there_twice_counts_once(tmp_path):
    """The last record of its values does; that of the evaluation of a step is another one."""
    records = [(1, "loss", 3.0), (1, "eval_loss", 4.0), (2, "loss", 2.0), (1, "loss", 1.0), (1, "eval_loss", 2.0)]
    text = "".join(json.dumps({"step": step, name: value}) + "\n" for step, name, value in records)
    (tmp_path / "metrics.jsonl").write_text(text)
    want, told = [{"step": step, name: value} for step, name, value in records[2:]], []
    assert read_metrics(tmp_path) == want
    logged(tmp_path, resumed=2, warn=told.append)
    assert read_metrics(tmp_path) == want
    assert (tmp_path / "metrics.1.jsonl").read_text() == text, "nothing of a user's is lost"
    assert [line.rpartition("; ")[2] for line in told] == ["records of steps that are there again: 2"]


class Kept:
    """A tracker as a user writes one: no base, and what it is told in a list."""

    fails, fault = "", RuntimeError("no server\nat all")

    def __init__(self):
        self.told = []

    def start(self, run):
        if self.fails == "start":
            raise self.fault
        self.told.append(run.id)

    def log(self, step, values):
        if self.fails == "log":
            raise self.fault
        self.told.append((step, *values))

    def finish(self, status):
        self.told.append(status)


def run_of(folder, steps, resumed=0, last_evaluated=(), names="a"):
    """What each tracker is told of a run of these steps, beside metrics.jsonl."""
    told = [Kept() for _ in names]
    asked = [RunTracker("log.tracker", name, kept) for name, kept in zip(names, told, strict=True)]
    with start_trackers(
        [RunTracker("log.dir", "", JsonLines(), once=False), *asked], folder, {}, resumed, print
    ) as log:
        for step in steps:
            log.log(step, loss=1.0 / step)
            if step in last_evaluated:
                log.log(step, eval_loss=2.0)
                log.log(step, samples=[{"text": "x"}])
    return [kept.told for kept in told]


def test_a_tracker_that_is_added_when_a_run_goes_on_is_told_of_the_steps_before(tmp_path):
    """Killed behind step 5 of which step 3 was saved, then behind 4; one is added, then the first is left out."""
    run_of(tmp_path, range(1, 6), last_evaluated=[3], names="a")
    first, second = run_of(tmp_path, range(4, 5), resumed=3, names="ab")
    assert first[1:-1] == []
    assert second[1:-1] == [*((n, "loss") for n in (1, 2, 3)), (3, "eval_loss"), (4, "loss")]
    assert run_of(tmp_path, range(4, 7), resumed=3, names="b")[0][1:-1] == [(5, "loss"), (6, "loss")]
    first, second = run_of(tmp_path, range(7, 8), resumed=6, names="ab")
    assert first[1:-1] == [(6, "loss"), (7, "loss")]
    assert second[1:-1] == [(7, "loss")]


def test_a_tracker_that_did_not_start_is_told_of_the_steps_before_when_it_does(tmp_path):
    run_of(tmp_path, range(1, 3), names="")
    failing = Kept()
    failing.fails = "start"
    with pytest.raises(UserError, match="no server"):
        start_trackers([RunTracker("log.tracker", "a", failing)], tmp_path, {}, 2, print)
    assert run_of(tmp_path, range(3, 4), resumed=2)[0][1:-1] == [(1, "loss"), (2, "loss"), (3, "loss")]


def test_a_run_that_is_killed_and_resumed_twice_tells_each_step_once(tmp_path):
    """Killed behind steps 7 and 5 of which step 4 was saved: the second death is of lines that were dropped."""
    (first,) = run_of(tmp_path, range(1, 8), last_evaluated=[4])
    (tmp_path / "samples.jsonl").write_text('{"step": 4, "text": "x"}\n')
    (second,) = run_of(tmp_path, range(5, 6), resumed=4)
    (third,) = run_of(tmp_path, range(5, 10), resumed=4, last_evaluated=[8])
    assert first[0] == second[0] == third[0], "one id"
    assert first[1:-1] == [
        *((n, "loss") for n in (1, 2, 3, 4)),
        (4, "eval_loss"),
        (4, "samples"),
        *((n, "loss") for n in (5, 6, 7)),
    ]
    assert second[1:-1] == []
    assert third[1:-1] == [(8, "loss"), (8, "eval_loss"), (8, "samples"), (9, "loss")]
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9]
    (anew,) = run_of(tmp_path, range(1, 3))
    assert anew[0] != first[0]
    assert anew[1:] == [(1, "loss"), (2, "loss"), 0]


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"id": 3}', b"\xff", b'{"id": "x", "told": {"loss": "a"}}'])
def test_a_run_whose_id_is_damaged_goes_on_with_a_new_one_and_says_so(damage, tmp_path, capsys):
    (tmp_path / FACTS).write_bytes(damage)
    ((run_id, _),) = run_of(tmp_path, (), resumed=3)
    assert len(run_id) == 8
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {tmp_path / FACTS} is damaged: ")
    assert line.endswith(f"; trackers are told of a new run, with id {run_id}")


def test_facts_that_cannot_be_written_are_one_line(tmp_path):
    (tmp_path / FACTS).mkdir()
    with pytest.raises(UserError, match=r"a directory that tracked.json can be written in; Is a directory$"):
        start_trackers([], tmp_path, {}, 0, print)


@pytest.mark.parametrize("fault", [ConnectionError("gone"), SystemExit(0), SystemExit("gone")])
def test_a_tracker_that_fails_is_a_line_and_no_run_ends(fault, tmp_path):
    failing, kept, said = Kept(), Kept(), []
    failing.fails, failing.fault = "log", fault
    asked = [RunTracker("log.tracker", "own:Mine", failing), RunTracker("log.wandb", "p", kept)]
    with Trackers(asked, RunFacts(tmp_path, "id"), said.append) as log:
        log.log(1, loss=1.0)
        log.log(2, loss=1.0)
    why = f"{type(fault).__name__}: {fault}"
    assert said == [f"warning: log.tracker = 'own:Mine': {why}; nothing more is sent there"]
    assert kept.told == ["id", (1, "loss"), (2, "loss"), 0]
    assert failing.told == ["id"]


@pytest.mark.parametrize("fault", [RuntimeError("no server\nat all"), SystemExit("no server")])
def test_a_tracker_that_does_not_start_is_one_line_and_those_before_it_are_told_the_end(fault, tmp_path):
    before, failing = Kept(), Kept()
    failing.fails, failing.fault = "start", fault
    asked = [RunTracker("log.tracker", "own:Mine", each) for each in (before, failing)]
    with pytest.raises(UserError, match=r"log.tracker = 'own:Mine': a tracker that starts; \w+: no server$"):
        Trackers(asked, RunFacts(tmp_path, "id"), print)
    assert before.told == ["id", 2]


def test_a_password_is_in_no_line(tmp_path, capsys):
    failing, server = Kept(), "http://me:SECRET@host:9/x"
    failing.fails, failing.fault = "start", RuntimeError(f"no answer of {server}")
    with pytest.raises(UserError, match=r"no answer of http://\*\*\*@host:9/x$"):
        Trackers([RunTracker("log.mlflow", server, failing)], RunFacts(tmp_path, "id"), print)
    say(f"error: Connection refused by {server}")
    assert capsys.readouterr().err == "error: Connection refused by http://***@host:9/x\n"


@pytest.mark.parametrize(
    ("fault", "status"), [(UserError("a", 1, "b"), 2), (RuntimeError("b"), 1), (KeyboardInterrupt(), 130), (None, 0)]
)
def test_a_loop_of_ones_own_tells_how_it_ended(fault, status, tmp_path):
    kept = Kept()
    with contextlib.suppress(BaseException), ax.tracked(ax.init(), tmp_path, kept):
        if fault is not None:
            raise fault
    assert kept.told[1:] == [status]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "as package.module:Class$"),
        (":Class", "as package.module:Class$"),
        ("no.such.module:Class", "ModuleNotFoundError: No module named 'no'"),
        ("json:Nothing", "AttributeError: module 'json' has no attribute 'Nothing'"),
        ("json:loads", "it is no class$"),
        ("sys:exit", "it is no class$"),
        ("os:abort", "it is no class$"),
        ("json:JSONDecoder", "it has no start$"),
    ],
)
def test_a_name_of_no_tracker_is_one_line(name, why):
    with pytest.raises(
        UserError, match=f"log.tracker = '{name}': the name of a class with start, log and finish.*{why}"
    ):
        tracker_class(name)


def test_a_loop_of_ones_own_that_cannot_be_tracked(tmp_path):
    grid, file = ax.init(), tmp_path / "file"
    file.touch()
    for says, call in {
        "grid = 'NoneType': a grid, as ax.init": lambda: ax.tracked(None, tmp_path),
        "grid = 'str': a grid": lambda: ax.tracked(str(tmp_path), grid),
        "directory = None: the path": lambda: ax.tracked(grid, None),
        "directory = '.*file': a directory that can be written; File exists": lambda: ax.tracked(grid, file),
        "directory = '.*x': a directory that can be written; Not a dir": lambda: ax.tracked(grid, file / "x"),
        "directory = '/proc/x': a directory that can be written; No such": lambda: ax.tracked(grid, "/proc/x"),
        "resumed = 'auto': an integer": lambda: ax.tracked(grid, tmp_path, resumed="auto"),
        "config = 'run.toml': a mapping": lambda: ax.tracked(grid, tmp_path, config="run.toml"),
        "step = 'a': an integer": lambda: log.log("a", loss=1.0),
        "loss = 'an array of 2 numbers': a number, a": lambda: log.log(1, loss=np.ones(2)),
        "step = None: an integer": lambda: log.saved(None, tmp_path),
    }.items():
        with pytest.raises(ax.UserError, match=f"^{says}"), ax.tracked(grid, tmp_path / "own") as log:
            call()


def test_a_loop_of_ones_own_is_tracked(tmp_path):
    grid, kept, other = ax.init(), Kept(), Kept()
    with ax.tracked(grid, tmp_path / "own", kept, other, config={"lr": 0.1}) as log:
        log.log(0, eval_loss=5.0)  # of weights that a run begins with
        log.log(1, loss=jnp.float32(2.0))  # as a Trainer's step returns it
        log.log(2, loss=np.float32(3.0))
        with pytest.raises(UserError, match=r"^loss = 'an array of 3 numbers': a number, a text"):
            log.log(3, loss=np.ones(3))
    assert read_metrics(tmp_path / "own") == [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 3.0},
    ]
    assert kept.told[1:] == other.told[1:] == [(0, "eval_loss"), (1, "loss"), (2, "loss"), 0]


MINE = """
made, saves = [], []

class Mine:
    def __init__(self):
        made.append(self)

    def start(self, run): ...
    def log(self, step, values): ...
    def finish(self, status): ...

    def saved(self, step, path):
        saves.append((step, path.exists()))
"""


def test_a_run_makes_its_tracker_once_and_tells_it_of_each_checkpoint(prepared, tmp_path, monkeypatch):
    """Those of step 2 and 4 take long: another save waits for each, behind the evaluation of step 3."""
    (tmp_path / "a_tracker_of_mine.py").write_text(MINE)
    config = write_config(tmp_path / "c.toml", prepared, 1, "[checkpoint]\nevery = 2\nkeep = 1\nbest = true")
    finish = OrbaxWriter.finish

    def slow(self, folder):
        time.sleep(0.5)
        finish(self, folder)

    monkeypatch.setattr(OrbaxWriter, "finish", slow)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"log_dir": "run", "log_tracker": "a_tracker_of_mine:Mine", "train_steps": 4, "train_eval_every": 3}
    assert main(["train", str(config), *flags(given)]) == 0
    mine = importlib.import_module("a_tracker_of_mine")
    assert len(mine.made) == 1
    assert mine.saves == [(step, True) for step in (2, 3, 4)]
