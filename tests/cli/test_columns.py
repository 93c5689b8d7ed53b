"""Help and refusals on terminals of any width: they end, and say the same."""

import contextlib
import signal

import pytest

from axonn_jax.cli.main import COMMANDS, main

LINES = [[command.name] for command in COMMANDS]
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
