"""Bodies of C++ functions in generated text."""

from collections.abc import Iterator


def cut(text: str) -> str | None:
    """Return a function's body up to its closing brace, None without one; braces in literals and comments are text."""
    depth = 1
    for at in _code(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[: at + 1]
    return None


def body_of(name: str, text: str) -> str:
    """Return the body of a function in a text, closing brace included; a text without the name is the body itself."""
    opening = text.find("{", text.find(name)) if name and name in text else -1
    rest = text[opening + 1 :]
    return cut(rest) or rest


def _code(text: str) -> Iterator[int]:
    """Indices of characters outside of literals and comments."""
    at = 0
    while at < len(text):
        char, pair = text[at], text[at : at + 2]
        if pair in ("//", "/*"):
            end = "\n" if pair == "//" else "*/"
            last = text.find(end, at + 2)
            at = len(text) if last < 0 else last + len(end)
        elif char in "\"'" and not (char == "'" and at and text[at - 1].isalnum()):  # 1'000 is a number
            at += 1
            while at < len(text) and text[at] not in (char, "\n"):
                at += 2 if text[at] == "\\" else 1
            at += 1
        else:
            yield at
            at += 1
