"""Command lines of dataclass arguments: values come back, every error is one line."""

import dataclasses
from typing import Annotated, Literal

import pytest

from axonn_jax.cli.arguments import Arg, parse
from axonn_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Try:
    """Tries."""

    source: Annotated[str, Arg(positional="SOURCE")]
    """Where from."""
    size: int = 3
    """How much."""
    kind: Literal["text", "code"] = "text"
    """Which."""
    long_name: float = 1.0
    """How far."""

    def __post_init__(self):
        if self.size < 0:
            raise UserError("--size", self.size, "an integer of at least 0")


def test_parse_returns_the_arguments():
    assert parse(Try, ["here", "--size", "4", "--long_name=2"], "prog") == Try("here", 4, "text", 2.0)
    assert parse(Try, ["here", "--long-name", "-2"], "prog").long_name == -2.0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("", "SOURCE = (not given): required; see prog --help"),
        ("here --sise 4", "--sise = '4': not a flag of prog; did you mean '--size'?"),
        ("here --sise=4", "--sise = '4': not a flag of prog; did you mean '--size'?"),
        ("--sise 4 here", "--sise = '4': not a flag of prog; did you mean '--size'?"),
        ("here -x", "-x = (not given): not a flag of prog"),
        ("here --size", "--size = (not given): an integer"),
        ("here --size four", "--size = 'four': an integer"),
        ("here --size=", "--size = '': an integer"),
        ("here --size -1", "--size = -1: an integer of at least 0"),
        ("here --long_name x", "--long-name = 'x': a number"),
        ("here --kind tex", "--kind = 'tex': one of text, code; did you mean 'text'?"),
        ("here there", "argument = 'there': not taken by prog; see prog --help"),
    ],
)
def test_parse_errors_are_one_line(capsys, argv, line):
    with pytest.raises(UserError) as raised:
        parse(Try, argv.split(), "prog")
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr() == ("", "")
