"""Command-line parser built from dataclasses: fields become flags, and their docstrings become help."""

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from axonn_jax.core.documents import look_at
from axonn_jax.core.errors import UNSET, UserError, local_path, nearest, nearest_or_all
from axonn_jax.core.options import field_docs
from axonn_jax.core.terminal import columns, wrapped

T = TypeVar("T")

# Per type: the placeholder in help, and the noun in error messages.
_NOUNS: Mapping[object, tuple[str, str]] = {
    int: ("INT", "an integer"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a text"),
    Path: ("PATH", "a path"),
    bool: ("{true,false}", "true or false"),
}
_INDENT = 24  # column of the help texts; narrower terminals use a third of their width


@dataclass(frozen=True)
class Arg:
    """Field annotation for what the type cannot say: ``Annotated[int | None, Arg(default="searched")]``."""

    default: str = ""
    """Text of the default in help, for a default value such as None that explains nothing."""
    positional: str = ""
    """Name of a positional argument, such as SOURCE."""
    short: str = ""
    """Flag that replaces the one derived from the field's name."""
    least: int | None = None
    most: int | None = None
    """Bounds of an accepted number, both inclusive; None for no bound."""
    repeat: bool = False
    """True if the flag takes one value and may be repeated."""
    takes_tail: bool = False
    """True if the argument takes the first word that is not a flag, and every word after it."""
    settings: bool = False
    """True if the argument collects every unknown --TABLE.KEY flag, with its value."""


Positive = Annotated[int, Arg(least=1)]
NotNegative = Annotated[int, Arg(least=0)]


@dataclass(frozen=True)
class Option:
    """One argument of a command line."""

    path: tuple[str, ...]
    """Field names from the outermost dataclass to the argument."""
    kind: Any
    """Type of one value."""
    multiple: bool
    default: Any
    """Default value; `MISSING` for a required argument."""
    doc: str
    group: str
    """Help text of the nested dataclass that holds the argument; empty for the outermost."""
    arg: Arg

    @property
    def flag(self) -> str:
        """Flag, or the name of a positional argument."""
        name = "TABLE.KEY" if self.arg.settings else ".".join(self.path).replace("_", "-")
        return self.arg.positional or self.arg.short or f"--{name}"

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help."""
        if get_origin(self.kind) is Literal:
            return "{" + ",".join(map(str, get_args(self.kind))) + "}"
        return _NOUNS.get(self.kind, ("KEY=VALUE,...", "a table"))[0]

    @property
    def accepted(self) -> str:
        """Description of the accepted values for error messages."""
        if get_origin(self.kind) is Literal:
            return f"one of {', '.join(map(str, get_args(self.kind)))}"
        least = "" if self.arg.least is None else f" of at least {self.arg.least}"
        return _NOUNS[self.kind][1] + least + ("" if self.arg.most is None else f" and at most {self.arg.most:,}")

    def value(self, text: str) -> Any:
        """Parse one value; raise ``UserError`` if the text is not accepted."""
        if get_origin(self.kind) is Literal:
            choices = {str(choice): choice for choice in get_args(self.kind)}
            if text in choices:
                return choices[text]
            raise UserError(self.flag, text, self.accepted + nearest(text, choices))
        try:
            if self.kind is str:
                # In an ASCII locale, Python decodes the UTF-8 bytes of argv to lone surrogates; decode them again.
                text = text.encode(errors="surrogateescape").decode(errors="surrogateescape")
            value = {"true": True, "false": False}[text.lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise UserError(self.flag, text, self.accepted) from None
        if self.kind is Path:
            value = Path(local_path(self.flag, text))
            look_at(self.flag, str(value) if text else text, empty=False)
        least, most = self.arg.least, self.arg.most
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            raise UserError(self.flag, value, self.accepted)
        return value


def parse(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Parse a command line into an instance of a dataclass.

    A field `long_name` becomes the flag `--long-name value` or `--long-name=value`. Fields of a dataclass in the field
    `grid` become `--grid.x`, booleans `--name` and `--no-name`, and tuples take all words up to the next flag.

    Raises:
        UserError: A flag is unknown, or a value is missing or not of its type.
        SystemExit: `--help` has printed help; the status is 0.
    """
    options = list(_options(cls, False))
    tail_option = next((option for option in options if option.arg.takes_tail), None)
    flag_words = argv if tail_option is None else argv[: _first_word(options, argv)]
    if any(word in ("-h", "--help") for word in flag_words):
        sys.stdout.write(help_text(cls, prog))
        raise SystemExit(0)
    values = _parse_words(options, flag_words, prog)
    if tail_option is not None:
        values[tail_option.path] = tuple(argv[len(flag_words) :])
    if missing := [option for option in options if option.path not in values and option.default is MISSING]:
        names = [option.flag if option.arg.positional else f"{option.flag} {option.metavar}" for option in missing]
        raise UserError(", ".join(names), UNSET, f"required; see {prog} --help")
    return _build(cls, {option.path: values.get(option.path, option.default) for option in options})


def _first_word(options: Sequence[Option], argv: Sequence[str]) -> int:
    takes_value = {option.flag for option in options if option.kind is not bool}
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        at += 2 if argv[at] in takes_value else 1
    return min(at, len(argv))


def _parse_words(options: Sequence[Option], argv: Sequence[str], prog: str) -> dict[tuple[str, ...], object]:
    positional = [option for option in options if option.arg.positional and not option.arg.takes_tail]
    flagged = [option for option in options if not option.arg.positional and not option.arg.settings]
    flags = {option.flag.replace("_", "-"): option for option in flagged}
    settings = next((option for option in options if option.arg.settings), None)
    nested = {option.path[0] for option in flagged if len(option.path) > 1}
    switches_off = {f"--no-{name[2:]}": option for name, option in flags.items() if option.kind is bool}
    values, words = dict[tuple[str, ...], Any](), list(reversed(argv))
    while words:
        if not _is_flag(word := words.pop()):
            if not positional:
                raise UserError("argument", word, f"not taken by {prog}; see {prog} --help")
            argument = positional.pop(0)
            values[argument.path] = argument.value(word)
        else:
            name, equals, text = word.partition("=")
            plain = name.replace("_", "-")
            option = flags.get(plain) or (None if equals else switches_off.get(plain))
            if option is None and settings and "." in name and name[2:].partition(".")[0] not in nested:
                value = [words.pop()] if not equals and words and not words[-1].startswith("--") else []
                values[settings.path] = (*values.get(settings.path, ()), word, *value)
                continue
            if option is None:
                following = words[-1] if words and not _is_flag(words[-1]) else UNSET
                hint = nearest_or_all(name, [*(option.flag for option in flagged), "--help"])
                raise UserError(name, text or following, f"not a flag of {prog}{hint}")
            if option.kind is bool:
                # --memory.sequence_parallel is also a flag of `train`, where the value is the next word.
                if not equals and "." in name and words and not (positional or _is_flag(words[-1])):
                    equals, text = "=", words.pop()
                values[option.path] = option.value(text) if equals else plain in flags
            elif option.multiple and not option.arg.repeat:
                texts = [text] if equals else []
                while words and not _is_flag(words[-1]):
                    texts.append(words.pop())
                values[option.path] = tuple(map(option.value, texts))
            else:
                if not equals and (not words or words[-1].startswith("--")):
                    raise UserError(option.flag, UNSET, option.accepted)
                value = option.value(text if equals else words.pop())
                values[option.path] = (*values.get(option.path, ()), value) if option.multiple else value
    return values


def _is_flag(word: str) -> bool:
    # A lone dash stands for standard input, and a negative number is a value.
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _build(cls: type[T], values: Mapping[tuple[str, ...], object]) -> T:
    kwargs, hints = dict[str, object](), get_type_hints(cls)
    for field in fields(cls):  # type: ignore[arg-type]
        if is_dataclass(kind := hints[field.name]):
            inner = {path[1:]: value for path, value in values.items() if path[0] == field.name}
            kwargs[field.name] = _build(kind, inner)  # type: ignore[arg-type]
        else:
            kwargs[field.name] = values[(field.name,)]
    return cls(**kwargs)


def _options(
    cls: type, texts: bool, path: tuple[str, ...] = (), group: str = "", default: object = MISSING
) -> Iterator[Option]:
    # Docstrings are read from the source, which only help needs: `texts` is False while parsing.
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls) if texts else {}
    inner = []
    for field in fields(cls):
        kind, arg = hints[field.name], Arg()
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            arg = next((note for note in notes if isinstance(note, Arg)), arg)
        value_default = default_of(field) if default is MISSING else getattr(default, field.name)
        if is_dataclass(kind):
            text = f"{field.name}: {docs.get(field.name, '')}"
            inner.append((kind, (*path, field.name), text, value_default))
            continue
        if get_origin(kind) in (Union, UnionType):
            kinds = [option for option in get_args(kind) if option is not NoneType]
            kind = kinds[0] if len(kinds) == 1 else Literal[sum(map(get_args, kinds), ())]
        # `Positive | None` leaves an Annotated type after None is removed.
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        multiple = get_origin(kind) is tuple
        value_kind = get_args(kind)[0] if multiple else kind
        yield Option((*path, field.name), value_kind, multiple, value_default, docs.get(field.name, ""), group, arg)
    # Nested dataclasses come last so that each forms one section of the help.
    for kind, below, text, value_default in inner:
        yield from _options(kind, texts, below, text, value_default)  # type: ignore[arg-type]


def default_of(field: "Field[Any]") -> object:
    """Return the default value of a field; `MISSING` if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def help_text(cls: type, prog: str, description: str = "", *, keys: bool = False) -> str:
    """Return the help of a command; with `keys`, flags are spelled like the keys of a TOML file."""
    width = columns()
    indent = min(_INDENT, width // 3)
    options = list(_options(cls, True))
    positional = [option for option in options if option.arg.positional]
    flags = [option for option in options if not option.arg.positional]
    needed = [option for option in flags if option.default is MISSING and not keys]
    words = ["[OPTIONS]", *(f"{option.flag} {option.metavar}" for option in needed)]
    words += [f"{option.flag}{' ...' * option.arg.takes_tail}" for option in positional]
    lines = [*wrapped(f"usage: {prog} {' '.join(words)}", width, "  "), ""]
    for paragraph in (description or inspect.getdoc(cls) or "").split("\n\n"):
        lines += [*wrapped(" ".join(paragraph.split()), width), ""]
    sections = [("arguments:", positional)] if positional else []
    for group in dict.fromkeys(option.group for option in flags):
        sections.append((group or "options:", [option for option in flags if option.group == group]))
    bold = "\x1b[1m{}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else "{}"
    for title, members in sections:
        lines += [bold.format(line) for line in wrapped(title, width)]
        lines += [line for option in members for line in _entry(option, width, indent, keys)]
        lines += [f"  {'-h, --help':{indent - 2}}print this text", ""] if title == "options:" else [""]
    return "\n".join(lines)


def _entry(option: Option, width: int, indent: int, keys: bool) -> list[str]:
    name = option.flag
    if keys:
        name = f"--{'.'.join(option.path)} {option.metavar}"
    elif option.kind is bool:
        name += f", --no-{name[2:]}" if option.default else ""
    elif not option.arg.positional:
        name += f" {option.metavar}{' ...' if option.multiple and not option.arg.repeat else ''}"
    notes = _note(option, keys)
    text = f"{option.doc} ({notes})" if notes else option.doc
    body = wrapped(text, width - indent)
    first = [f"  {name:{indent - 2}}{body.pop(0)}"] if len(name) + 4 <= indent else [f"  {name}"]
    return [*first, *(" " * indent + line for line in body)]


def _note(option: Option, keys: bool) -> str:
    if option.default is MISSING:
        return "" if option.arg.positional else "required"
    if option.arg.repeat:
        return "repeatable"
    if option.arg.default:
        return f"default: {option.arg.default}"
    if option.default in (None, "", (), {}) or (option.default is False and not keys):
        return ""
    shown = " ".join(map(str, option.default)) if option.multiple else str(option.default)
    return f"default: {shown.lower() if option.kind is bool else shown}"
