"""What a hostile or broken disk makes of a file, drawn from a seeded generator."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m‮evil\r"
RAW = "@raw@"
"""Begins a text that stands for JSON as it is spelled behind it."""

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 5_000_000, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e300),
    *("", "x", "0", "..", ".", "/", "\0", "a\0b", "\ud800", "x" * 100_000, ESCAPES, "/dev/zero", "/etc/passwd"),
    *(RAW + text for text in ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5000)),
    *([], {}, [[]], {"": {}}, ["x"], {"x": 1}, "2026-99-99", "0001-01-01T00:00:00+00:00"),
    *("../../elsewhere/secret.txt", "../../../../../elsewhere/part_000", "../../../../../elsewhere/secret.txt"),
    "part_000/../part_000",
    RAW + "[" * 100_000 + "]" * 100_000,
    RAW + '{"a":' * 50_000 + "1" + "}" * 50_000,
    RAW + "[" + "0," * 300_000 + "0]",
    RAW + "[" + "{}," * 300_000 + "{}]",
)

TOML = (
    *("0", "-1", "1", "5_000_000", "2147483647", "9223372036854775807", "-9223372036854775808", "1e999", "1e300"),
    *("5e-324", "nan", "inf", "-inf", "true", '""', '"x"', '"\\u001b]0;owned\\u0007"', '"../../elsewhere"'),
    *('"/dev/zero"', "[]", "{}", "2026-01-01", '"a\\u0000b"', "1_000_000_007", "100_000", "16_777_216"),
    *("0x" + "f" * 6000, "9" * 6000, "[" * 3000 + "]" * 3000, "{a=" * 300 + "1" + "}" * 300),
    *('"' + "x" * 90_000 + '"', "[" + "1," * 30_000 + "]"),
)


def bytes_of(random: random.Random, raw: bytes) -> tuple[str, bytes]:
    """Bytes flipped, cut, taken out or put in."""
    at = random.randrange(len(raw) + 1)
    kind = random.choice(["flip", "truncate", "insert", "delete", "double", "invalid", "brackets", "zeros"])
    if kind == "flip":
        changed = bytearray(raw or b"x")
        for _ in range(random.choice([1, 1, 3, 20])):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return kind, bytes(changed)
    inserted = {
        "insert": random.randbytes(random.choice([1, 4, 100])),
        "double": raw,
        "invalid": b"\xff\xfe\xc3(",
        "brackets": b"[" * 200_000,
        "zeros": bytes(1_000_000),
    }
    if kind == "truncate":
        return f"{kind} at {at}", raw[:at]
    if kind == "delete":
        return f"{kind} at {at}", raw[:at] + raw[at + random.choice([1, 10, 200]) :]
    return f"{kind} at {at}", raw[:at] + inserted[kind] + raw[at:]


def json_of(random: random.Random, value: Any) -> tuple[str, Any]:
    """One place of the JSON changed: a hostile value, a key gone, renamed or added, an entry many times."""
    places = list(_places(value))
    weights = [1 / (1 + sum(other[0] is holder for other in places)) for holder, _ in places]  # not only in long lists
    holder, key = random.choices(places, weights)[0]
    kind = random.choice(["value", "value", "value", "remove", "rename", "add", "many", "exchange"])
    hostile = random.choice(HOSTILE)
    if kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        name = random.choice([name for name in HOSTILE if isinstance(name, str)])
        holder[name.removeprefix(RAW)] = holder.pop(key)
    elif kind == "add" and isinstance(holder, dict):
        holder[random.choice(["later", ESCAPES, "../x", "/dev/zero"])] = hostile
    elif kind == "many" and isinstance(holder, list):
        holder[key:key] = [holder[key]] * 20_000
    elif kind == "exchange":
        other, place = random.choice(places)
        holder[key], other[place] = other[place], holder[key]
        _unknot(value)
    else:
        kind, holder[key] = "value", hostile
    return f"{kind} {str(key)[:60]!r} {str(hostile)[:30]!r}", value


def _places(value: Any) -> Any:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _unknot(value: Any) -> None:
    """An exchange may put a thing into itself, which JSON cannot say."""
    try:
        json.dumps(value)
    except ValueError:
        value.clear()


def spelled(value: Any, **options: Any) -> str:
    """JSON with what begins with `RAW` as it is spelled."""
    text, parts = json.dumps(value, **options), []
    while (at := text.find('"' + RAW)) >= 0:
        end = at + 1
        while text[end] != '"' or text[end - 1] == "\\":
            end += 1
        parts += [text[:at], json.loads(text[at : end + 1]).removeprefix(RAW)]
        text = text[end + 1 :]
    return "".join([*parts, text])


def toml_of(random: random.Random, text: str) -> tuple[str, str]:
    """One line of TOML changed."""
    lines = text.splitlines()
    at = random.choice([at for at, line in enumerate(lines) if " = " in line])
    key, kind = lines[at].partition(" = ")[0], random.choice(["value"] * 5 + ["remove", "twice", "unknown", "dotted"])
    hostile = random.choice(TOML)
    changed = {
        "value": [f"{key} = {hostile}"],
        "remove": [],
        "twice": [lines[at], lines[at]],
        "unknown": [lines[at], f'"later\\u001b[2J" = {hostile}'],
        "dotted": [".".join("a" * random.choice([10, 3000, 100_000])) + " = 1"],
    }
    lines[at : at + 1] = changed[kind]
    return f"{kind} {key} {hostile[:30]}", "\n".join(lines) + "\n"


def another_file(random: random.Random, path: Path, elsewhere: Path) -> str:
    """Something else in the place of a file."""
    kinds: dict[str, Callable[[], object]] = {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "elsewhere": lambda: path.symlink_to(elsewhere),
        "dangling": lambda: path.symlink_to("nowhere"),
        "loop": lambda: path.symlink_to(path.name),
        "empty": path.touch,
        "missing": lambda: None,
        "huge": lambda: (path.touch(), os.truncate(path, 1 << 36)),
    }
    kind = random.choice(list(kinds))
    path.unlink()
    kinds[kind]()
    return kind
