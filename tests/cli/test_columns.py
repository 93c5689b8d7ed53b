"""Terminals of any width: help and refusals end and say the same; signs of life on standard error."""

import contextlib
import io
import json
import signal
import sys
import threading

import pytest

from axonn_jax.cli.main import COMMANDS, main
from axonn_jax.core.terminal import Ticker
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.planning.simulate.simulator import simulate
from axonn_jax.run.progress import Progress

LINES = [[name] for name in COMMANDS]
SECONDS = 20


@contextlib.contextmanager
def limited():
    """Fails where the block takes longer than `SECONDS`."""

    def over(*_):
        raise TimeoutError(f"no end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("columns", ["1", "5"])
@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_every_help_ends_where_there_is_no_width(words, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    with limited():
        assert main([*words, "--help"]) == 0
    shown, error = capsys.readouterr()
    assert len(shown.splitlines()) < 2000
    assert error == ""
    assert max(map(len, shown.splitlines())) >= 38


@pytest.mark.parametrize("words", [[], *LINES], ids=" ".join)
def test_help_is_as_wide_as_the_terminal(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*words, "--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("columns", ["", "0", "1", "2", "3", "4", "5", "6", "10", "-1", "wide", "1000000000"])
def test_a_refusal_is_the_same_line_at_any_width(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    with limited():
        assert main(["doctor", "--jsom"]) == 2
        assert main(["doctor", "--help"]) == 0
    shown, error = capsys.readouterr()
    assert error == "error: --jsom = (not given): not a flag of axonn-jax doctor; did you mean '--json'?\n"
    assert "--timeout FLOAT" in shown
    assert max(map(len, shown.splitlines())) <= 400


class Stream(io.StringIO):
    """Tells when something was written; a terminal or not."""

    def __init__(self, live):
        super().__init__()
        self.live, self.written = live, threading.Event()

    def isatty(self):
        return self.live

    def write(self, text):
        super().write(text)
        if text.strip():
            self.written.set()
        return len(text)


def shown(live):
    stream = Stream(live)
    with Ticker("waiting", stream=stream, first=0.01, every=0.01) as ticker:
        ticker.now("simulating a step", 10_000)
        ticker.done(4096)
        stream.written.clear()
        assert stream.written.wait(30)
    return stream.getvalue()


def test_lines_away_from_a_terminal():
    for line in shown(False).splitlines()[1:]:
        assert line.startswith("simulating a step, 0:0")
        assert line.endswith(": 4,096 of 10,000 tasks")


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "4,096 of 10,000 tasks\n" in shown(True)
    monkeypatch.setattr(sys, "stderr", stream := Stream(True))
    with Progress(3, interval=0.0) as progress:
        progress.update(1, 2.5, 1000.0, 0.5)
    assert "step 1/3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_live_line_on_a_terminal_that_is_gone_in_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = shown(True)
    assert "\n" not in text
    assert "4,096 of 10,000 tasks" in text
    assert text.endswith("\r\x1b[K")


def test_what_is_quick_says_nothing():
    stream = Stream(True)
    with Ticker("waiting", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_a_simulation_tells_how_far_it_is():
    told = []
    layout = PipelineShape(4, 1100)
    simulate(
        layout, policy_of("1f1b"), task_time=lambda task: 1.0, message_time=lambda message: 0.0, progress=told.append
    )
    assert told == sorted(told)
    assert told
    assert told[-1] <= 2 * 4 * 1100


def test_a_long_command_says_what_it_does_on_standard_error(capsys, monkeypatch):
    from axonn_jax.cli import simulate as command

    def slow(*args, **kinds):
        return Ticker(*args, **kinds, first=0.001, every=0.01)

    monkeypatch.setattr(command, "Ticker", slow)
    argv = ["simulate", "--model", "gpt-5b", "--machine", "perlmutter", "--devices", "16", "--batch-tokens", "1Mi"]
    assert main([*argv, "--grid.pipe", "8", "--grid.data", "2", "--microbatch", "1", "--jitter", "0.1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finished"]
    assert "simulating a step, replica 2 of 2, 0:" in err
    assert " tasks" in err
