"""Command lines of dataclass arguments: tyro's parser, with its error boxes as one line."""

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from axonn_jax.errors import NOT_GIVEN, UserError, nearest

T = TypeVar("T")

_BOX = "│|╭╮╰╯"
_SHOWN = (40, 400)
"""The fewest and most columns of a help text: below six, tyro's boxes never end."""
_READ = (80, 80)
"""Columns of what is read back: in narrow ones the names of flags are broken."""
_NOUNS = {"INT": "an integer", "FLOAT": "a number", "STR": "a text", "PATH": "a path", "{True,False}": "True or False"}


class _Capture(io.StringIO):
    """Looks to tyro like the stream it stands for, which decides about colours and box characters."""

    def __init__(self, stream: Any):
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return str(getattr(self._stream, "encoding", "utf-8")).lower()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return bool(self._stream.isatty())


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Catches what is printed on standard output and standard error."""
    out, err = _Capture(sys.stdout), _Capture(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


@contextlib.contextmanager
def columns(least: int = _SHOWN[0], most: int = _SHOWN[1]) -> Iterator[None]:
    """Lets tyro write this many columns, whatever `COLUMNS` or the terminal says; it takes no width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(max(least, min(most, shutil.get_terminal_size().columns)))
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def parse(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Returns the arguments as an instance of a dataclass; `--help` prints tyro's help and raises SystemExit(0).

    Raises:
        UserError: a flag is unknown, or a value is missing or not of its type.
    """
    import tyro

    if any(word in ("-h", "--help") for word in argv):
        with columns():
            tyro.cli(cls, args=["--help"], prog=prog)
    try:
        with columns(*_READ), captured() as (_, err):
            return tyro.cli(cls, args=list(argv), prog=prog)
    except SystemExit as stop:
        if (mine := _cause(stop)) is not None:
            raise mine from None
        box = _unboxed(err.getvalue())
    with columns(*_READ), captured() as (out, _), contextlib.suppress(SystemExit):
        tyro.cli(cls, args=["--help"], prog=prog)
    raise _error(box, _unboxed(out.getvalue()), argv, prog)


def _cause(error: BaseException) -> UserError | None:
    """The UserError that a dataclass raised on construction, which tyro turns into a box."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, UserError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def _unboxed(text: str) -> list[str]:
    """The lines inside the box, with their indentation; a rule ends the part that says what is wrong."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [line.strip(_BOX).rstrip() for line in plain.splitlines() if line.strip()]


def _error(box: list[str], usage: list[str], argv: Sequence[str], prog: str) -> UserError:
    """Says in one line what tyro's box says in many; falls back on the box's own words."""
    kinds = _flags(usage)
    for at, word in enumerate(argv):
        if word == "--":
            break
        name, _, value = word.partition("=")
        if name.startswith("-") and name.replace("_", "-") not in kinds and not _number(name):
            following = argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("-") else NOT_GIVEN
            hint = nearest(name, kinds) or f", which has {', '.join(kinds)}"
            return UserError(name, value or following, f"not a flag of {prog}{hint}")
    said = " ".join(line.strip() for line in _head(box))
    if found := re.search(r"[Mm]issing value for argument '(.+?)'", said):
        return UserError(found[1], NOT_GIVEN, kinds.get(found[1], "a value"))
    if found := re.search(r"invalid choice '(.*?)' for argument '(.+?)'\. Expected one of \((.*)\)", said):
        choices = re.findall(r"'(.*?)'", found[3])
        return UserError(found[2], found[1], f"one of {', '.join(choices)}{nearest(found[1], choices)}")
    if found := re.search(r"Error parsing (\S+?):? (.*)", said):
        return UserError(found[1], _given(found[1], argv), kinds.get(found[1], f"a value that can be read; {found[2]}"))
    if said.startswith("Unrecognized options:"):
        extra = said.removeprefix("Unrecognized options:").strip()
        return UserError("argument", extra, f"not taken by {prog}; see {prog} --help")
    if said.startswith("Missing from"):
        names = [line.strip() for line in _head(box) if re.fullmatch(r"\s{5}\S.*", line)]
        return UserError(", ".join(names) or "arguments", NOT_GIVEN, f"required; see {prog} --help")
    return UserError("arguments", " ".join(argv), f"{said}; see {prog} --help")


def _given(flag: str, argv: Sequence[str]) -> object:
    """The value of a flag on the command line; the last one counts."""
    given: object = NOT_GIVEN
    for word, following in zip(argv, [*argv[1:], NOT_GIVEN], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            given = value if equals else following
    return given


def _head(box: list[str]) -> list[str]:
    lines = [line for line in box if not re.match(r"[─-]+ .*[─-]+$", line)]  # the title is in the box's edge
    rule = next((at for at, line in enumerate(lines) if re.fullmatch(r"\s*[─-]{3,}\s*", line)), len(lines))
    return lines[:rule]


def _flags(usage: list[str]) -> dict[str, str]:
    """Every flag of a help text, with what it accepts."""
    kinds: dict[str, str] = {"--help": "", "-h": ""}
    for line in usage:
        found = re.match(r"\s*((?:--?[a-zA-Z][\w.-]*(?:, )?)+)(?: (\S+))?", line)
        if found is None:
            continue
        metavar = found[2] or ""
        noun = _NOUNS.get(metavar, f"one of {metavar[1:-1]}" if metavar.startswith("{") else "a value")
        kinds |= dict.fromkeys(re.split(r", ", found[1].strip(", ")), noun)
    return kinds


def _number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
