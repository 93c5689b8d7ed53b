"""Templates of instruction data: a conversation as text, with the characters of its answers."""

import re
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from axonn_jax.core.documents import read_bytes
from axonn_jax.core.errors import UserError, nearest, refused
from axonn_jax.files.data.instructions.chat import ChatTemplate, special_tokens
from axonn_jax.files.data.instructions.schemas import Conversation

_MOST = 1 << 20
_PLACES = [chr(code) for code in range(0xE000, 0xF900)]  # private-use characters, which no template treats specially
_TASK = "Below is an instruction that describes a task"
_INTRO = f"{_TASK}. Write a response that appropriately completes the request."
_INTRO_INPUT = (
    f"{_TASK}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


class Passage(NamedTuple):
    """Text of a document that is encoded on its own."""

    text: str
    marked: Sequence[tuple[int, int]]
    """Character range of each marked answer, end exclusive."""
    ended: bool
    """True if the end token follows, marked if an answer is."""


class Unmarked(UserError):
    """Refusal of a conversation in which a template's text does not show the answers."""


class Alpaca:
    """The form of Stanford's Alpaca and of HPC-Coder-V2, without jinja; later turns follow without the first lines.

    A system message takes the place of the first lines.
    """

    special = False
    """True if a special token's name in the text is that token."""
    source = f"{_INTRO}\n{_INTRO_INPUT}"
    """Text that the form depends on."""

    def jinja(self, end: str) -> str:
        """Return a chat template of the same text, with this text of the end token."""
        return (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + " + repr(end) + " }}"
            "{% elif m.role == 'system' %}{{ m.content + '\n\n' }}"
            "{% else %}{{ "
            + repr(f"{_INTRO}\n\n")
            + " if loop.first else '\n\n' if loop.previtem.role == 'assistant' }}"
            "{{ '### Instruction:\n' + m.content + '\n\n### Response:\n' }}{% endif %}{% endfor %}"
        )

    def takes(self, key: str) -> bool:
        """True if the text depends on this key of a message; role and content alone make it."""
        return False

    def passages(self, conversation: Conversation, marked: Collection[int]) -> list[Passage]:
        """Return a passage a turn, which the end token ends, with marks around the answers of these numbers.

        Raises ``UserError`` for a conversation that the form cannot express.
        """
        intro, turns = None, conversation.messages
        if turns[0]["role"] == "system":
            intro, turns = turns[0]["content"], turns[1:]
        roles = [message["role"] for message in turns]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            accepted = "messages of user and assistant in turns, perhaps behind one of system; see --template chat"
            raise UserError("messages", ", ".join(roles), accepted)
        if any(message["content"] is None for message in turns):
            raise UserError("messages", None, "a text as the content of each message; see --template chat")
        passages, first = list[Passage](), len(conversation.messages) - len(turns)
        for at in range(0, len(turns), 2):
            instruction, input_text = conversation.instruction_input or (turns[at]["content"], "")
            if intro is None:
                intro = _INTRO_INPUT if input_text else _INTRO
            question = f"### Instruction:\n{instruction}\n\n"
            question += f"### Input:\n{input_text}\n\n" if input_text else ""
            prompt = f"{intro}\n\n" if not passages else "\n\n"
            prompt += f"{question}### Response:\n"
            text = prompt + turns[at + 1]["content"]
            passages.append(Passage(text, [(len(prompt), len(text))] if first + at + 1 in marked else [], True))
        return passages


class Jinja:
    """The form of a chat template, which writes end tokens itself."""

    special = True

    def __init__(self, template: ChatTemplate):
        self.template, self.source = template, template.source

    def jinja(self, end: str) -> str:
        """Return the chat template itself; of a model's several there is no one text."""
        return self.source

    def takes(self, key: str) -> bool:
        """True if the template has the key's name."""
        return self.template.takes(key)

    def passages(self, conversation: Conversation, marked: Collection[int]) -> list[Passage]:
        """Return the one passage of a conversation; an answer goes from the generation prompt to the turn's end.

        The template's own marks of answers count, where it has such. Raises `Unmarked` where answers cannot be told
        apart.
        """
        talk, tools = conversation.messages, conversation.tools
        text, spans = self.template.spans(talk, tools)
        answers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
        if not self.template.is_tagged(tools):
            spans = self._answers(text, conversation, [number for number in answers if number in marked])
        elif len(spans) == len(answers):
            spans = [span for number, span in zip(answers, spans, strict=True) if number in marked]
        elif {*marked} != {*answers}:
            accepted = f"a template that marks each of {len(answers)} answers; this one marks {len(spans)}"
            raise Unmarked("--template", text[-80:], accepted)
        return [Passage(text, spans, False)]

    def _answers(self, text: str, conversation: Conversation, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return the character ranges of the answers with these message numbers, from a few renderings.

        If the template writes the same text around several answers, the first one determines the range for all.
        """
        # Rendering once per answer is quadratic in the turns, so reuse the range of answers with equal surroundings.
        mark = next(place for place in _PLACES if place not in text + self.source + conversation.text)
        contents, shown = self._contents(text, conversation, mark), dict[tuple[str, str], tuple[int, int]]()
        spans = list[tuple[int, int]]()
        for number in numbers:
            first, behind, around = contents.get(number, (0, 0, None))
            if around in shown:
                lead, trail = shown[around]
                spans.append((first - lead, behind + trail))
                continue
            spans.append(self._answer(text, conversation, number, mark))
            lead, trail = first - spans[-1][0], spans[-1][1] - behind
            if around and 0 <= lead <= len(around[0]) and 0 <= trail <= len(around[1]):
                shown[around] = lead, trail
        return spans

    def _contents(
        self, text: str, conversation: Conversation, mark: str
    ) -> dict[int, tuple[int, int, tuple[str, str]]]:
        """Return start, end and surrounding texts of each content, or {} if the surroundings depend on a content."""
        contents = {
            at: message["content"] for at, message in enumerate(conversation.messages) if message["content"] is not None
        }
        signs = {at: {"content": f"{mark}{at}{mark}"} for at in contents}
        talk = [message | signs.get(at, {}) for at, message in enumerate(conversation.messages)]
        try:
            parts = self.template.text(talk, conversation.tools, answers=False).split(mark)
        except UserError:
            return {}
        if parts[1::2] != [*map(str, contents)] or not text.startswith(parts[0]):
            return {}
        places, at = dict[int, tuple[int, int, tuple[str, str]]](), len(parts[0])
        for (number, content), prefix, suffix in zip(contents.items(), parts[::2], parts[2::2], strict=False):
            # Templates often strip a content, so accept it with spaces removed on either side.
            forms = (content, content.strip(), content.lstrip(), content.rstrip())
            form = next((form for form in forms if text.startswith(form + suffix, at)), None)
            if form is None:
                return {}
            places[number] = at, at + len(form), (prefix, suffix)
            at += len(form + suffix)
        return places if at == len(text) else {}

    def _answer(self, text: str, conversation: Conversation, at: int, mark: str) -> tuple[int, int]:
        """Return the character range of the answer in message number `at`; `mark` occurs in no text.

        The range is what the message adds to the previous messages' text, if the full text begins with it. For a
        template that rewrites earlier turns, or ends the text after the last turn, the range follows from rendering the
        message with another content.
        """
        talk, tools = conversation.messages, conversation.tools
        head = self.template.text(talk[:at], tools) if at else ""
        closed = text if at + 1 == len(talk) else self.template.text(talk[: at + 1], tools, answers=False)
        if text.startswith(closed) and closed.startswith(head):
            if at and head != self.template.text(talk[:at], tools, answers=False):
                return len(head), len(closed)
            place = self._parted(talk[: at + 1], tools, at, mark)[0]
            if closed.startswith(place):
                return max(len(place), len(head)), len(closed)
        prefix, suffix = self._parted(talk, tools, at, mark)
        begin, tail = self._parted(talk[: at + 1], tools, at, mark)
        if text.startswith(prefix) and text.endswith(suffix) and len(prefix) + len(suffix) <= len(text):
            return len(prefix), len(text) - len(suffix) + len(_common(suffix, tail))
        body = _common(text[len(prefix) :], closed[len(begin) :])
        if body and text.startswith(prefix) and closed.startswith(begin):
            return len(prefix), len(prefix) + len(body)
        raise Unmarked("--template", text[-80:], "a template in whose text each answer can be found; or --loss all")

    def _parted(self, talk: Sequence[Any], tools: object, at: int, mark: str) -> tuple[str, str]:
        """Return the text before and behind the content of message number `at`."""
        changed = [*talk[:at], talk[at] | {"content": mark}, *talk[at + 1 :]]
        prefix, place, suffix = self.template.text(changed, tools, answers=False).rpartition(mark)
        if not place:
            raise Unmarked("--template", prefix[-80:], "a template with a place for the response; or --loss all")
        return prefix, suffix


def _common(first: str, second: str) -> str:
    """Return the common prefix of two texts; if both continue, without a trailing unclosed tag such as `<|`."""
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    shared = first[:size]
    return shared if shared in (first, second) else re.sub(r"[<\[][^<>\[\]\s]*$", "", shared)


Template = Alpaca | Jinja
"""Form of conversations as text."""


def template_name(tokenizer: Path) -> str:
    """Return the default template's name: the tokenizer's chat template, with which the model is prompted later."""
    return "chat" if ChatTemplate.exists(tokenizer if tokenizer.is_dir() else tokenizer.parent) else "alpaca"


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
    with refused("--template", name, "a file in jinja that can be read"):
        source = read_bytes(Path(name), _MOST).decode("utf-8-sig")
    return Jinja(ChatTemplate(source, special_tokens(folder, "--tokenizer"), "--template", name))


def chat_template_of(name: str, folder: Path, end: str) -> ChatTemplate:
    """Return the chat template of a name (`template_of`) for prompting; `end` is the text of the end token."""
    template = template_of(name, folder)
    if isinstance(template, Jinja):
        return template.template
    return ChatTemplate(template.jinja(end), special_tokens(folder, "--template"), "--template", name)
