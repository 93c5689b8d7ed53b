"""Forms of a prompt: the bare text to continue, or a request in a template; and the function's body in the answer."""

import re
from pathlib import Path
from typing import Protocol

from axonn_jax.data.instructions.chat import ChatTemplate
from axonn_jax.data.instructions.schemas import Conversation
from axonn_jax.data.instructions.templates import Alpaca, chat_template_of
from axonn_jax.evaluate.cut import body_of, cut

_FENCE = "```"
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)(```|\Z)", re.DOTALL)
_NAME = re.compile(r"(\w+)\s*\([^()]*\)\s*\{?\s*\Z")


class PromptForm(Protocol):
    """Form of a prompt."""

    prompted: bool
    """True for a request, by ParEval's word."""
    special: bool
    """True if the tokenizer adds its special tokens to the text."""

    def text(self, prompt: str) -> str:
        """Return the text to continue."""

    def ended(self, prompt: str, text: str) -> bool:
        """Return True if a continuation holds the whole function."""

    def body(self, prompt: str, text: str) -> str:
        """Return the function's body in a continuation, closing brace included."""


class Bare:
    """The prompt itself, which the function's body continues."""

    prompted, special = False, True

    def text(self, prompt: str) -> str:
        """Return the prompt without blanks at its ends."""
        return prompt.strip()

    def ended(self, prompt: str, text: str) -> bool:
        """Return True behind the closing brace."""
        return cut(text) is not None

    def body(self, prompt: str, text: str) -> str:
        """Return the text up to the closing brace."""
        return cut(text) or text


class Asked:
    """ParEval's request to complete a function, in a template; the answer has a block of code."""

    prompted = True

    def __init__(self, template: ChatTemplate | None):
        self._template, self.special = template, template is None

    def text(self, prompt: str) -> str:
        """Return the request in the template, up to where the answer begins."""
        request = (
            f"Complete the following c++ function.\n{_FENCE}c++{prompt.strip()}{_FENCE}\nWrite only the function "
            f"{_name(prompt)} and no other code. Enclose your solution in {_FENCE}c++ and {_FENCE}."
        )
        user = {"role": "user", "content": request}
        if self._template is not None:
            return self._template.text([user])
        return Alpaca().passages(Conversation([user, {"role": "assistant", "content": ""}]), ())[0].text

    def ended(self, prompt: str, text: str) -> bool:
        """Return True behind a block of code that names the function: `body` takes none after it."""
        return any(closed and _name(prompt) in block for block, closed in _BLOCK.findall(text))

    def body(self, prompt: str, text: str) -> str:
        """Return the body of the function in the first block that holds it, or of the first block."""
        blocks, name = [block for block, _ in _BLOCK.findall(text)] or [text], _name(prompt)
        block = next((block for block in blocks if name in block), blocks[0])
        return body_of(name, block)


def form_of(template: str, folder: Path) -> PromptForm:
    """Return the form of a template, or of none; raise ``UserError`` for an unknown name or a file of no use."""
    if template == "none":
        return Bare()
    return Asked(None if template == "alpaca" else chat_template_of(template, folder, ""))


def _name(prompt: str) -> str:
    """Return the name of the function that a prompt ends with."""
    match = _NAME.search(prompt.strip().splitlines()[-1])
    return match[1] if match else ""
