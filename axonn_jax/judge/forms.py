"""Prompt forms: the bare text to continue, or an instruction in a template; and function bodies in the answers."""

import re
from collections.abc import Iterator
from pathlib import Path

from axonn_jax.files.data.instructions.chat import ChatTemplate
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import Alpaca, chat_template_of

_FENCE = "```"
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(```|\Z)", re.DOTALL)
_NAME = re.compile(r"(\w+)\s*\([^()]*\)\s*\{?\s*\Z")


class Bare:
    """Form without a template: the model continues the prompt with the function's body."""

    prompted = False
    """ParEval's field `prompted`: True for an instruction."""
    special = True
    """True if the tokenizer adds its special tokens to the text."""

    def text(self, prompt: str) -> str:
        """Return the text to continue: the prompt without surrounding whitespace."""
        return prompt.strip()

    def ended(self, prompt: str, text: str) -> bool:
        """Return True if a continuation contains the function's closing brace."""
        return cut(text) is not None

    def body(self, prompt: str, text: str) -> str:
        """Return the function's body: the continuation up to the closing brace."""
        return cut(text) or text


class Instructed:
    """Form with a template: ParEval's instruction to complete a function, answered by a block of code."""

    prompted = True

    def __init__(self, template: ChatTemplate | None):
        self._template, self.special = template, template is None

    def text(self, prompt: str) -> str:
        """Return the instruction in the template, up to the start of the answer."""
        request = (
            f"Complete the following c++ function.\n{_FENCE}c++{prompt.strip()}{_FENCE}\nWrite only the function "
            f"{_name(prompt)} and no other code. Enclose your solution in {_FENCE}c++ and {_FENCE}."
        )
        user = {"role": "user", "content": request}
        if self._template is not None:
            return self._template.text([user])
        return Alpaca().passages(Conversation([user, {"role": "assistant", "content": ""}]), ())[0].text

    def ended(self, prompt: str, text: str) -> bool:
        """Return True after a complete block of code that names the function, the one that `body` takes."""
        return any(closed and _place(_name(prompt), block) >= 0 for block, closed in _BLOCK.findall(text))

    def body(self, prompt: str, text: str) -> str:
        """Return the function's body from the first block that names the function, or else from the first block."""
        blocks, name = [block for block, _ in _BLOCK.findall(text)] or [text], _name(prompt)
        block = next((block for block in blocks if _place(name, block) >= 0), blocks[0])
        return body_of(name, block)


PromptForm = Bare | Instructed
"""Form of a prompt."""


def form_of(template: str, folder: Path) -> PromptForm:
    """Return the prompt form of a template; raise ``UserError`` for an unknown name or an unusable file."""
    if template == "none":
        return Bare()
    return Instructed(None if template == "alpaca" else chat_template_of(template, folder, ""))


def _name(prompt: str) -> str:
    match = _NAME.search(prompt.strip().splitlines()[-1])
    return match[1] if match else ""


def _place(name: str, text: str) -> int:
    match = re.search(rf"\b{name}\b", text)
    return match.start() if match else -1


def cut(text: str) -> str | None:
    """Return a function's body up to its closing brace, ignoring literals and comments; None without such a brace."""
    depth = 1
    for at in _code(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[: at + 1]
    return None


def body_of(name: str, text: str) -> str:
    """Return a function's body with its closing brace; a text that does not name the function is taken as the body."""
    opening = text.find("{", place) if name and (place := _place(name, text)) >= 0 else -1
    tail = text[opening + 1 :]
    return cut(tail) or tail


def _code(text: str) -> Iterator[int]:
    # Yields the indices of characters outside of literals and comments.
    at = 0
    while at < len(text):
        char, pair = text[at], text[at : at + 2]
        if pair in ("//", "/*"):
            end = "\n" if pair == "//" else "*/"
            last = text.find(end, at + 2)
            at = len(text) if last < 0 else last + len(end)
        elif char in "\"'" and not (char == "'" and at and text[at - 1].isalnum()):  # 1'000 is one number
            at += 1
            while at < len(text) and text[at] not in (char, "\n"):
                at += 2 if text[at] == "\\" else 1
            at += 1
        else:
            yield at
            at += 1
