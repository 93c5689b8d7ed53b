"""Templates of instruction data: a conversation as text, with the characters of its answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from axonn_jax.data.instructions.chat import ChatTemplate, special_tokens
from axonn_jax.data.instructions.schemas import Messages
from axonn_jax.documents import read_bytes
from axonn_jax.errors import UserError, nearest

_MOST = 1 << 20
_PLACE = "\uf8ff"  # of private use: no template knows it
_TASK = "Below is an instruction that describes a task"
_INTRO = f"{_TASK}. Write a response that appropriately completes the request."
_INTRO_INPUT = (
    f"{_TASK}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


class Passage(NamedTuple):
    """Text of a document that is encoded on its own."""

    text: str
    answers: Sequence[tuple[int, int]]
    """First character of each answer and the one behind its last."""
    ended: bool
    """True if the end token follows, as the last of the answer."""


class Template(Protocol):
    """Form of conversations as text."""

    special: bool
    """True if a special token's name in the text is that token."""
    source: str
    """Text that the form depends on."""

    def passages(self, messages: Messages, *, marked: bool) -> list[Passage]:
        """Return the text of a conversation, with answers if `marked`.

        Raises ``UserError`` for a conversation that it cannot express.
        """


class Alpaca:
    """The form of Stanford's Alpaca and of HPC-Coder-V2, without jinja; later turns follow without the first lines.

    A system message takes the place of the first lines.
    """

    special, source = False, f"{_INTRO}\n{_INTRO_INPUT}"

    def passages(self, messages: Messages, *, marked: bool) -> list[Passage]:
        """Return a passage a turn, which the end token ends."""
        intro, turns = None, messages
        if messages[0]["role"] == "system":
            intro, turns = messages[0]["content"], messages[1:]
        roles = [message["role"] for message in turns]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            accepted = "messages of user and assistant in turns, perhaps behind one of system; see --template chat"
            raise UserError("messages", ", ".join(roles), accepted)
        passages = list[Passage]()
        for asked, answered in zip(turns[::2], turns[1::2], strict=True):
            given = asked.get("input")
            if intro is None:
                intro = _INTRO_INPUT if given else _INTRO
            question = f"### Instruction:\n{asked['instruction'] if given else asked['content']}\n\n"
            question += f"### Input:\n{given}\n\n" if given else ""
            before = f"{intro}\n\n" if not passages else "\n\n"
            before += f"{question}### Response:\n"
            text = before + answered["content"]
            passages.append(Passage(text, [(len(before), len(text))], True))
        return passages


class Jinja:
    """The form of a chat template, which writes end tokens itself."""

    special = True

    def __init__(self, template: ChatTemplate):
        self._template, self.source = template, template.source

    def passages(self, messages: Messages, *, marked: bool) -> list[Passage]:
        """Return the one passage of a conversation; an answer goes from the generation prompt to the turn's end."""
        text = self._template.text(messages, answers=False)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"] if marked else []
        return [Passage(text, [self._answer(text, messages, at) for at in turns], False)]

    def _answer(self, text: str, messages: Messages, at: int) -> tuple[int, int]:
        """Return the characters of the answer that message number `at` is."""
        before = messages[:at]
        head = self._template.text(before) if before else ""
        closed = self._template.text(messages[: at + 1], answers=False)
        place = self._template.text([*before, messages[at] | {"content": _PLACE}], answers=False).rfind(_PLACE)
        if place < 0:
            raise UserError("--template", text[-80:], "a template with a place for the response")
        if not (text.startswith(closed) and closed.startswith(head)):
            accepted = "a template that leaves the text of earlier turns as it is; or --loss all"
            raise UserError("--template", text[-80:], accepted)
        opened = before and head != self._template.text(before, answers=False)
        return len(head) if opened else max(place, len(head)), len(closed)


def template_of(name: str, tokenizer: Path) -> Template:
    """Return the template of a name: alpaca, chat (the tokenizer's own) or a file's in jinja.

    Raises ``UserError`` for another name, a file of no use, or a tokenizer without a template.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if name == "alpaca":
        return Alpaca()
    if name == "chat":
        return Jinja(ChatTemplate.of(folder, "--template", name))
    if not name.endswith(".jinja"):
        raise UserError("--template", name, f"alpaca, chat or FILE.jinja{nearest(name, ('alpaca', 'chat'))}")
    try:
        source = read_bytes(Path(name), _MOST).decode()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError("--template", name, f"a file in jinja that can be read; {why}") from None
    return Jinja(ChatTemplate(source, special_tokens(folder, "--tokenizer", str(tokenizer)), "--template", name))
