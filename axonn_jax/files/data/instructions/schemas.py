"""Schemas of instruction data: the rows of JSON Lines or Parquet as conversations."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from axonn_jax.core.documents import parse_json
from axonn_jax.core.errors import UserError, nearest
from axonn_jax.files.data.instructions.pack import MarkedTokens
from axonn_jax.files.data.prompts import file_line
from axonn_jax.files.data.read import UNREADABLE, is_table, open_binary, rows_of

Messages = list[dict[str, Any]]
"""Objects with a role, a content and more keys, as a chat template takes them."""

_QUESTIONS = ("instruction", "question", "problem")
_ANSWERS = ("output", "response", "answer", "solution")
_TOKENS = ("input_ids", "labels", "attention_mask")
_IGNORED_LABEL = -100  # transformers' label of a token that is no target
_LISTS = ("messages", "conversations")
_SCHEMAS = '{"messages": [...]}, {"conversations": [...]}, {"prompt", "completion"}, {"instruction", "output"} or '
_SCHEMAS += '{"input_ids"}'
_KEYS = (*_LISTS, "prompt", "completion", *_QUESTIONS, "input", *_ANSWERS, *_TOKENS[:1])
_MARKS = ("weight", "train", "loss_mask")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool"}
"""Roles of ShareGPT's rows by other names."""


class Conversation(NamedTuple):
    """Conversation to train on."""

    messages: Messages
    tools: object = None
    """Descriptions of tools, as a chat template takes them."""
    untrained: frozenset[int] = frozenset()
    """Numbers of the messages that marks leave out."""
    prompt: int = 0
    """Number of the first messages that are a prompt, of which no answer is trained."""
    instruction_input: tuple[str, str] | None = None
    """Instruction and input of the first message, whose content is both."""
    document: str | None = None
    """A text of no messages, to be trained on as it is."""
    ready: MarkedTokens | None = None
    """Tokens of no messages, to be trained on as they are."""

    @property
    def trained(self) -> list[int]:
        """Numbers of the answers to train on."""
        answers = [number for number in self.answers if number >= self.prompt]
        return [number for number in answers if number not in self.untrained]

    @property
    def answers(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def text(self) -> str:
        """All of it in JSON, equal for equal conversations."""
        if self.document is not None:
            return json.dumps(self.document, ensure_ascii=False)
        if self.ready is not None:
            return json.dumps([self.ready.ids.tolist(), self.ready.counts.tolist()])
        first = dict(zip(("instruction", "input"), self.instruction_input or (), strict=False))
        parts: list[object] = [self.messages[0] | first, *self.messages[1:]]
        parts += [{"tools": self.tools}] * (self.tools is not None)
        parts += [{"untrained": sorted(self.untrained)}] * bool(self.untrained)
        parts += [{"prompt": self.prompt}] * bool(self.prompt)
        return json.dumps(parts, ensure_ascii=False, sort_keys=True)


def conversations(
    path: Path, field: str, unused: Counter[str], takes: Callable[[str], bool], vocab_ids: Set[int]
) -> Iterator[tuple[int, Conversation | UserError]]:
    """Yield the line's number and the conversation of every row of a file, compressed or not.

    An unusable row yields its error instead. `unused` counts the keys of rows that are not read, and the keys of
    messages that the template ignores; `vocab_ids` are the tokenizer's ids. Raises ``UserError`` for `field` if the
    file cannot be read.
    """
    # A pipe would block, and the file is read more than once.
    if not path.is_file():
        raise UserError(field, str(path), "a file with an object in JSON on each line, or Parquet")
    try:
        for number, record in enumerate(rows_of(path), 1) if is_table(path) else _lines(path):
            try:
                row = _without_nulls(record) if isinstance(record, dict) else _row(record, number)
                conversation, used = conversation_of(row, vocab_ids)
                _check(conversation)
            except UserError as error:
                yield number, UserError(field, file_line(path, number), error.accepted)
                continue
            keys = {key for message in conversation.messages for key in message} - {"role", "content"}
            unused.update(row.keys() - used)
            unused.update({"tools"} if conversation.tools and not takes("tools") else ())
            unused.update(f"{key} of messages" for key in keys if not takes(key))
            yield number, conversation
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(field, str(path), f"a file that can be read; {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers, without a byte-order mark."""
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield number, line


def _without_nulls(row: Mapping[str, object]) -> dict[str, object]:
    """Return a table's row without nulls at any depth, except those of `content`."""
    # Parquet fills every key that only some rows have with null, which must not count as present; a null `content` has
    # a meaning, as that of a message with tool calls.

    def entry(value: object) -> object:
        if isinstance(value, list) and isinstance((value or [0])[0], dict | list):
            return [*map(entry, value)]
        if isinstance(value, dict):
            return {key: entry(inner) for key, inner in value.items() if inner is not None or key == "content"}
        return value

    return {key: entry(value) for key, value in row.items() if value is not None}


def _row(line: bytes, number: int) -> dict[str, object]:
    """Return the object of a line without nulls, all of whose texts UTF-8 can express."""
    try:
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"this is a {type(row).__name__}")
    except ValueError as error:
        array = number == 1 and line.lstrip().startswith(b"[")
        hint = "; of one array `jq -c .[]` makes lines" if array else f"; {error}"
        raise UserError("row", None, f"an object in JSON{hint}") from None
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        raise UserError("row", row, "text that UTF-8 can express") from None
    return {key: value for key, value in row.items() if value is not None}


def conversation_of(row: Mapping[str, Any], vocab_ids: Set[int] = frozenset()) -> tuple[Conversation, set[str]]:
    """Return the conversation of a row in one of the schemas, and the keys that it is in.

    The content of an instruction with an input is both texts. If prompt and completion are lists of messages, those of
    the completion are trained. From a row with token ids nothing else is read; its ids must be in `vocab_ids`. Raises
    ``UserError`` for a row in none of the schemas.
    """
    if _TOKENS[0] in row:
        return Conversation([], ready=_ready(row, vocab_ids)), {*_TOKENS} & row.keys()
    tools = tools_of(row)
    tool_keys = {"tools"} & row.keys()
    if listed := next((key for key in _LISTS if key in row), None):
        messages, untrained = _listed(row[listed])
        return Conversation(messages, tools, untrained), {listed} | tool_keys
    if "text" in row and not row.keys() & {*_KEYS}:
        return Conversation([], document=_text(row, "text")), {"text"}
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
    if isinstance(row[question], list) and isinstance(row[answer], list):
        prompt, count = row[question], len(row[question])
        (messages, first), (behind, second) = _listed(prompt), _listed(row[answer])
        untrained = first | {number + count for number in second}
        return Conversation([*messages, *behind], tools, untrained, count), {question, answer} | tool_keys
    instruction_input, used, content = None, {question, answer}, _text(row, question)
    if question != "prompt":
        used.add("input")
        if row.get("input"):
            instruction_input = content, _text(row, "input")
            content = "\n\n".join(instruction_input)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": _text(row, answer)}]
    return Conversation(messages, tools, instruction_input=instruction_input), (used & row.keys()) | tool_keys


def _ready(row: Mapping[str, Any], vocab_ids: Set[int]) -> MarkedTokens:
    """Return the tokens of a row without padding; tokens with the label -100 do not count as targets.

    As in transformers, a label belongs to the token at its position. Raises ``UserError`` for other labels, for ids
    that are not in `vocab_ids`, and for lists of different lengths.
    """
    lists = {key: row[key] for key in _TOKENS if key in row}
    for key, numbers in lists.items():
        if not isinstance(numbers, list):
            raise UserError("row", numbers, f"a list of whole numbers in {key!r}; this is {type(numbers).__name__}")
        # bool is a subclass of int, so compare types exactly.
        if not {*map(type, numbers)} <= {int}:
            wrong = next(number for number in numbers if type(number) is not int)
            raise UserError("row", numbers, f"whole numbers in {key!r}; this one has {repr(wrong)[:40]}")
        if len(numbers) != len(row["input_ids"]):
            raise UserError("row", numbers, f"{len(row['input_ids'])} {key}, as input_ids; these are {len(numbers)}")
    ids, mask = row["input_ids"], lists.get("attention_mask", [1] * len(row["input_ids"]))
    labels = lists.get("labels", ids)
    first, behind = (mask.index(1), len(mask) - mask[::-1].index(1)) if 1 in mask else (0, 0)
    if not {*mask} <= {0, 1} or 0 in mask[first:behind]:
        raise UserError("row", mask, "an attention_mask of ones, with zeros before and behind the text alone")
    ids, labels = ids[first:behind], labels[first:behind]
    if not ids:
        raise UserError("row", ids, "at least one token in 'input_ids'")
    if unknown := {*ids} - vocab_ids:
        accepted = f"input_ids of the tokenizer, whose largest is {max(vocab_ids)}; {str(min(unknown))[:40]} is none"
        raise UserError("row", ids, accepted)
    tokens, targets = np.asarray(ids, np.uint32), np.asarray(labels)
    counts = targets != _IGNORED_LABEL
    for at in np.flatnonzero(counts & (targets != tokens)):
        accepted = (
            f"labels that are {_IGNORED_LABEL} or the token at their place; {str(labels[at])[:40]} is at {ids[at]}"
        )
        raise UserError("row", labels, accepted)
    return MarkedTokens(tokens, counts, 0)


def _text(row: Mapping[str, object], key: str) -> str:
    if not isinstance(row[key], str):
        raise UserError("row", dict(row), f"a text in {key!r}; this is {type(row[key]).__name__}")
    return str(row[key])


def tools_of(row: Mapping[str, object]) -> list[dict[str, object]] | None:
    """Return a row's tools, which may be JSON in a string; an empty list is not the same as None."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = parse_json(tools.encode()) if tools.strip() else None
        except ValueError as error:
            raise UserError("row", tools, f"tools as a list of objects; {error}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError("row", tools, "tools as a list of objects")
    return tools


def _listed(entries: object) -> tuple[Messages, frozenset[int]]:
    """Return a list's messages without their marks, and the numbers of the messages that marks exclude."""
    accepted = 'messages as a list of objects such as {"role": "user", "content": "hi"}'
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError("row", entries, accepted)
    messages, untrained = Messages(), set[int]()
    for number, entry in enumerate(entries):
        message = dict(entry)
        if "from" in message and "role" not in message:
            message |= {"role": message.pop("from"), "content": message.pop("value", None)}
            message["role"] = _ROLES.get(message["role"], message["role"])
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = content = _concatenated(content)
        calls = message.get("role") == "assistant" and message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not (isinstance(content, str) or (content is None and calls)):
            raise UserError("row", entries, f"{accepted}: texts both")
        marks = {key: message.pop(key) for key in _MARKS if message.get(key) is not None}
        for key, mark in marks.items():
            if mark not in (0, 1):
                raise UserError("row", entries, f"0, 1, false or true as the {key!r} of a message; this is {mark!r}")
            if mark and message["role"] != "assistant":
                raise UserError("row", entries, f"{key!r} above 0 of assistant's messages alone")
        if not all(marks.values()):
            untrained.add(number)
        messages.append(message)
    return messages, frozenset(untrained)


def _concatenated(parts: list[Any]) -> str:
    """Return the text of a content that is a list of parts."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UserError("row", parts, 'parts of a content such as {"type": "text", "text": "hi"}, no others')
    return "".join(part["text"] for part in parts)


def _check(conversation: Conversation) -> None:
    """Raise ``UserError`` for a conversation without an answer."""
    if conversation.ready is not None:
        return
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if conversation.document is not None:
        answers = [{"content": conversation.document}]
    if not any((message["content"] or "").strip() or message.get("tool_calls") for message in answers):
        accepted = 'a response: a text of "assistant" or in "output" or "completion", not empty'
        raise UserError("row", conversation.messages, accepted)
