"""Schemas of instruction data: the rows of JSON Lines as conversations."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from axonn_jax.data.prompts import file_line
from axonn_jax.data.read import UNREADABLE, open_binary
from axonn_jax.documents import parse_json
from axonn_jax.errors import UserError, nearest

Messages = list[dict[str, Any]]
"""A conversation: objects with a role, a content and more keys, as a chat template takes them."""

_QUESTIONS = ("instruction", "question", "problem")
_ANSWERS = ("output", "response", "answer", "solution")
_SCHEMAS = '{"messages": [...]}, {"prompt", "completion"} or {"instruction", "input", "output"}'
_KEYS = ("messages", "prompt", "completion", *_QUESTIONS, "input", *_ANSWERS)


def conversations(path: Path, field: str, unused: Counter[str]) -> Iterator[tuple[int, Messages]]:
    """Yield the line's number and the conversation of every row of a file, compressed or not.

    `unused` counts the keys of rows that are not read. Raises ``UserError``, which calls the file `field` and names the
    line, for the first row of no use.
    """
    if not path.is_file():  # a pipe would block, and the file is read more than once
        raise UserError(field, str(path), "a file with an object in JSON on each line")
    try:
        with open_binary(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _conversation(line, path, number, field, unused)
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(field, str(path), f"a file that can be read; {error}") from None


def _conversation(line: bytes, path: Path, number: int, field: str, unused: Counter[str]) -> Messages:
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"this is a {type(row).__name__}")
    except ValueError as error:
        array = number == 1 and line.lstrip().startswith(b"[")
        hint = "; of one array `jq -c .[]` makes lines" if array else f"; {error}"
        raise UserError(field, file_line(path, number), f"an object in JSON{hint}") from None
    try:
        messages, used = messages_of(row)
        _check(messages)
    except UserError as error:
        raise UserError(field, file_line(path, number), error.accepted) from None
    unused.update(row.keys() - used)
    return messages


def messages_of(row: Mapping[str, Any]) -> tuple[Messages, set[str]]:
    """Return the conversation of a row in one of three schemas, and the keys that it is in.

    Of an instruction with an input, the user's content is both, and the message has each alone too. Raises
    ``UserError`` for a row in none of the schemas.
    """
    if "messages" in row:
        return _listed(row["messages"]), {"messages"}
    question = next((key for key in _QUESTIONS if key in row), None)
    answer = next((key for key in _ANSWERS if key in row), None)
    if question is None or answer is None:
        question, answer = (
            ("prompt" if "prompt" in row else question),
            ("completion" if "completion" in row else answer),
        )
    if question is None and answer is None:
        names = [f"{key!r}{nearest(key, _KEYS)}" for key in list(row)[:5]]
        raise UserError("row", dict(row), f"{_SCHEMAS}; this row has {', '.join(names) or 'no keys'}")
    if question is None or answer is None:
        missing = "an answer" if answer is None else "a question"
        keys = ("completion", *_ANSWERS) if answer is None else ("prompt", *_QUESTIONS)
        raise UserError("row", dict(row), f"{missing} in one of {', '.join(keys)}; this row has {', '.join(row)}")
    asked = {"role": "user", "content": _text(row, question)}
    used = {question, answer}
    if question != "prompt" and row.get("input"):
        instruction, given = asked["content"], _text(row, "input")
        asked |= {"content": f"{instruction}\n\n{given}", "instruction": instruction, "input": given}
    if question != "prompt":
        used.add("input")
    return [asked, {"role": "assistant", "content": _text(row, answer)}], used & row.keys()


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise UserError("row", dict(row), f"a text in {key!r}; this is {type(row[key]).__name__}")
    return str(row[key])


def _listed(messages: Any) -> Messages:
    accepted = 'messages as a list of objects such as {"role": "user", "content": "hi"}'
    if not isinstance(messages, list) or not messages:
        raise UserError("row", messages, accepted)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError("row", messages, f"{accepted}: texts both")
    return messages


def _check(messages: Messages) -> None:
    """Raise ``UserError`` for a conversation without an answer, or of characters that are no text."""
    if not any(message["role"] == "assistant" and message["content"].strip() for message in messages):
        raise UserError("row", messages, 'a response: a text of "assistant" or in "output" or "completion", not empty')
    try:
        for message in messages:
            message["content"].encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        raise UserError("row", messages, "text that UTF-8 can express") from None
