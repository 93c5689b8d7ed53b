"""Config files: TOML with command-line overrides read into a `Config`, and a `Config` written as TOML."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from axonn_jax.core.documents import TOML_BYTES, parse_toml, read_bytes
from axonn_jax.core.errors import UNSET, UserError, foreign_name_hint, local_path, nearest
from axonn_jax.core.options import not_none, typed
from axonn_jax.run.config import Config

_WORDS = {"true": True, "True": True, "false": False, "False": False}


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the type of every key, by table and key name, in declaration order."""
    return MappingProxyType(
        {name: MappingProxyType(get_type_hints(cls)) for name, cls in get_type_hints(Config).items()}
    )


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Split a command line into positional arguments and flags.

    Flags of text keys keep their text, flags of list keys are split at commas, and flags of table keys are parsed as
    comma-separated KEY=VALUE entries. Any other value becomes a number or boolean if it parses as one. A boolean flag
    without a value is true; any other flag without one has the value `UNSET`.

    Args:
        argv: Command-line words after the command's name.

    Returns:
        The positional arguments, and (dotted name, value) of every flag in order.

    Raises:
        UserError: An argument starts with a single dash, or a table's entries are malformed.
    """
    kinds = {f"{table}.{key}": not_none(kind) for table, keys in tables().items() for key, kind in keys.items()}
    texts = [name for name, kind in kinds.items() if kind is str or isinstance((get_args(kind) or (0,))[0], str)]
    switches = [name for name, kind in kinds.items() if kind is bool]
    lists = [name for name, kind in kinds.items() if get_origin(kind) is tuple]
    inline = {name: get_args(kind)[1] for name, kind in kinds.items() if get_origin(kind) is Mapping}
    positional: list[str] = []
    flags: list[tuple[str, object]] = []
    # Reversed, so that `pop` takes the next word and a flag can also take the one after it.
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if not word.startswith("--"):
            if word.startswith("-"):
                raise UserError("flag", word, f"flags start with two dashes, as in --{word.lstrip('-')}")
            positional.append(word)
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        value: object = UNSET
        # In `--log.tensorboard run.toml` the next word is the config file, not the switch's value.
        file_next = name in switches and bool(words) and words[-1].endswith(".toml")
        if not equals and words and not words[-1].startswith("--") and not file_next:
            equals, text = "=", words.pop()
        if equals and name in inline:
            value = _inline(name, text, inline[name])
        elif equals:
            value = text if name in texts else text.split(",") if name in lists else _scalar(text)
        elif name in switches:
            value = True
        flags.append((name, value))
    return positional, flags


def _inline(name: str, text: str, kind: type) -> dict[str, object]:
    table = dict[str, object]()
    for entry in text.split(",") if text else ():
        # Either side may be a path that contains "=": a number ends the entry, a text follows the first sign.
        key, equals, value = entry.partition("=") if kind is str else entry.rpartition("=")
        if not equals or key in table:
            raise UserError(name, text, "KEY=VALUE, with commas between several, and each key once")
        table[key] = value if kind is str else _scalar(value)
    return table


def _scalar(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return text


def read(path: str | Path, flags: Iterable[tuple[str, object]] = ()) -> Config:
    """Read a config from a TOML file.

    Args:
        path: The TOML file; its stem replaces `{name}` in log.dir, its folder `{folder}` in checkpoint.weights.
        flags: (dotted name, value) pairs, which override the file.

    Raises:
        UserError: The file cannot be read or is not TOML, or a key or flag is unknown or of the wrong type.
    """
    path = Path(local_path("CONFIG.toml", str(path)))
    try:
        # Editors on Windows write a byte-order mark, which TOML does not allow.
        text = read_bytes(path, TOML_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError("CONFIG.toml", str(path), "no such file; give the path of a TOML file") from None
    except OSError as error:
        raise UserError("CONFIG.toml", str(path), f"a TOML file that can be read; {error.strerror}") from None
    except ValueError as error:
        accepted = f"a TOML file, which is UTF-8 text; {error}"
        if path.is_dir():
            accepted = "is a directory; give the path of a TOML file"
        raise UserError("CONFIG.toml", str(path), accepted) from None
    config = loads(text, flags, source=str(path), name=path.stem)
    weights = config.checkpoint.weights.replace("{folder}", str(path.absolute().parent))
    return replace(config, checkpoint=replace(config.checkpoint, weights=weights))


def loads(
    text: str,
    flags: Iterable[tuple[str, object]] = (),
    *,
    source: str = "text",
    name: str | None = None,
) -> Config:
    """Parse a config from TOML text.

    Args:
        text: The TOML text.
        flags: (dotted name, value) pairs, which override the text.
        source: Name of the text in errors.
        name: Replacement for `{name}` in log.dir; None leaves it in place.

    Raises:
        UserError: The text is not TOML, or a key or flag is unknown or of the wrong type.
    """
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise UserError("CONFIG.toml", source, f"valid TOML; {error}") from None
    checked: dict[str, dict[str, Any]] = {table: {} for table in tables()}
    # Flags come last, so they overwrite the file's entries.
    for dotted, value in (*_entries(raw), *flags):
        table, key = _split_key(dotted, value)
        checked[table][key] = typed(tables()[table][key], value, dotted)
    if name is not None and "{name}" in (folder := checked["log"].get("dir", "runs/{name}")):
        checked["log"]["dir"] = folder.replace("{name}", name)
    return Config(**{table: get_type_hints(Config)[table](**values) for table, values in checked.items()})


def _entries(raw: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    for table, content in raw.items():
        if isinstance(content, dict):
            _check_table(table, content)
            yield from ((f"{table}.{key}", value) for key, value in content.items())
        elif table in tables():
            raise UserError(table, content, f"a table, [{table}] on a line of its own and its keys below")
        else:
            home = [f"{name}.{table}" for name, keys in tables().items() if table in keys]
            hint = f"; did you mean {' or '.join(home)}?" if home else ""
            raise UserError(table, content, f"not inside a table; the tables are {_listed(tables())}{hint}")


def _check_table(table: str, value: object) -> None:
    if table in tables():
        return
    raise UserError(table, value, f"not a known table{nearest(table, tables())}; the tables are {_listed(tables())}")


def _split_key(dotted: str, value: object) -> tuple[str, str]:
    table, _, key = dotted.partition(".")
    if not key:
        everywhere = _keys_of_all()
        same = [name for name in everywhere if name.endswith(f".{table}")]
        hint = f"; did you mean {' or '.join(map(repr, same))}?" if same else nearest(table, everywhere)
        if table in tables():
            hint = f"; its keys are {_listed(f'{table}.{k}' for k in tables()[table])}"
        raise UserError(dotted, value, f"not a known flag, which are --table.key{hint}")
    if table not in tables():
        raise UserError(
            dotted, value, f"no table {table!r}{nearest(table, tables())}; the tables are {_listed(tables())}"
        )
    keys = tables()[table]
    if key not in keys:
        hint = foreign_name_hint(key, [*keys, *_keys_of_all()]) or nearest(key, keys)
        hint = hint or f"; the keys of [{table}] are {_listed(keys)}"
        raise UserError(dotted, value, f"not a known key{hint}")
    return table, key


def _keys_of_all() -> list[str]:
    return [f"{table}.{key}" for table, keys in tables().items() for key in keys]


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))


def settings_by_name(config: Config) -> dict[str, object]:
    """Return all settings of a config by dotted name, such as `train.steps`."""
    tables = {table.name: getattr(config, table.name) for table in fields(config)}
    return {f"{name}.{key.name}": getattr(table, key.name) for name, table in tables.items() for key in fields(table)}


def to_toml(config: Config) -> str:
    """Format the config as TOML text that `loads` reads back as an equal config."""
    lines: list[str] = []
    for table in fields(config):
        value = getattr(config, table.name)
        assert is_dataclass(value)
        lines += [table_toml(table.name, {key.name: getattr(value, key.name) for key in fields(value)}), ""]
    return "\n".join(lines)


def table_toml(name: str, values: Mapping[str, object]) -> str:
    """Format a table of a config as TOML text.

    TOML has no null, so None values are omitted; the defaults make them None again when the text is read.
    """
    return "\n".join([f"[{name}]", *(f"{key} = {_literal(v)}" for key, v in values.items() if v is not None)])


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)} = {_literal(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
