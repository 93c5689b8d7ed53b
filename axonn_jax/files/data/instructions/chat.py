"""Chat template: the jinja program of a model's authors, run in a sandbox, that renders messages as text."""

import contextlib
import json
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_jax.core.documents import read_bytes, read_json
from axonn_jax.core.errors import UserError
from axonn_jax.files.huggingface.pretrained import SETTINGS, root_of, template_names, tokenizer_settings

if TYPE_CHECKING:
    import jinja2

FILE = "chat_template.jinja"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the templates that transformers selects if a model has several; others, such as `rag`, only on request."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first two."""
_MOST = 16 << 20
_GROWTH = 512 << 20  # bytes, of the process while a template runs
_ACCEPTED = "a model whose tokenizer has a chat template"


class ChatTemplate:
    """Template with the texts of special tokens by name, such as `bos_token`.

    If there are several named sources, conversations with tools use `tool_use`, if it exists, and all others `default`.

    Raises ``UserError`` for `field` = `value` if the text is not a template, or jinja2 is not installed.
    """

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str], field: str, value: object):
        sources = {DEFAULT: source} if isinstance(source, str) else source
        self._tokens, self._programs = dict(tokens), dict[str, tuple["jinja2.Template", _Spans]]()
        self.source = "".join(sources.values())
        """Text of all templates."""
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise UserError(field, value, "an installation with jinja2: pip install 'axonn_jax[hf]'") from None
        try:
            for name, text in sources.items():
                spans = _Spans()
                with _bounded_memory():  # compilation evaluates constant expressions, which can be huge
                    self._programs[name] = _environment(spans).from_string(text), spans
        except (TemplateError, RecursionError, MemoryError) as error:
            raise UserError(field, value, f"a template in jinja; {_line(error)}") from None

    @classmethod
    def of(cls, directory: Path, field: str, value: object) -> "ChatTemplate":
        """Read the templates of a directory's tokenizer; raise ``UserError`` if there is none to use."""
        try:
            sources = _sources(directory)
        except (OSError, ValueError) as error:
            raise UserError(field, value, f"{_ACCEPTED}; {_line(error)}") from None
        if not (templates := {name: sources[name] for name in (DEFAULT, WITH_TOOLS) if sources.get(name)}):
            available = f"{', '.join(sorted(sources))} alone, no {DEFAULT}" if any(sources.values()) else "none"
            raise UserError(field, value, f"{_ACCEPTED}; {str(directory)!r} has {available}")
        return cls(templates, special_tokens(directory, field), field, value)

    @classmethod
    def exists(cls, directory: Path) -> bool:
        """Return True if a directory's tokenizer has a template."""
        # An unreadable template counts, so that `of` reports it instead of a silent default.
        try:
            return any(_sources(directory).get(name) for name in (DEFAULT, WITH_TOOLS))
        except (OSError, ValueError):
            return True

    def takes(self, key: str) -> bool:
        """Return True if a template reads the key, or an alias of it (`_plain`)."""
        names = {key, *_REASONING[:2]} if key in _REASONING else {key}
        return any(re.search(rf"\b{re.escape(name)}\b", self.source) for name in names)

    def is_tagged(self, tools: object = None) -> bool:
        """Return True if the template of a conversation with such tools marks answers by `{% generation %}`."""
        return self._program(tools)[1].tagged

    def _program(self, tools: object) -> "tuple[jinja2.Template, _Spans]":
        """Return the template of a conversation: an empty list of tools counts as tools, as in transformers."""
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self._programs else DEFAULT
        if name not in self._programs:
            accepted = f"a conversation with tools: of the model's templates there is {WITH_TOOLS!r}, no {DEFAULT!r}"
            raise UserError("tools", tools, accepted)
        return self._programs[name]

    def text(self, messages: object, tools: object = None, *, answers: bool = True) -> str:
        """Return the text of a conversation, by default up to where the model answers."""
        return self.spans(messages, tools, answers=answers)[0]

    def spans(self, messages: Any, tools: object = None, *, answers: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the characters that the template marks as answers.

        Args:
            messages: A list of objects with `role` and `content`, as for the template.
            tools: Descriptions of tools, as for the template.
            answers: True if the text ends where an answer begins.

        Raises:
            UserError: the messages are no such list, or the template refuses.
        """
        good = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
        if not good:
            raise UserError(
                "messages", str(messages)[:80], 'a list of objects such as {"role": "user", "content": "hi"}'
            )
        template, spans = self._program(tools)
        variables = {**self._tokens, "messages": [*map(_plain, messages)], "tools": tools, "documents": None}
        pieces = spans.begin()
        try:
            with _bounded_memory():
                for piece in template.generate(**variables, add_generation_prompt=answers):
                    pieces.append(piece)
        except Exception as error:  # the template is an arbitrary program and may raise anything
            raise UserError("messages", str(messages)[:80], f"what the chat template takes; {_line(error)}") from None
        return "".join(pieces), spans.marked


def _plain(message: Mapping[str, object]) -> dict[str, object]:
    """Return a message as transformers passes it to templates: without nulls, and with aliases of its reasoning."""
    # A null would be rendered as the text "None".
    fields = {key: value for key, value in message.items() if value is not None}
    thought = next((fields[key] for key in _REASONING if key in fields), None)
    return fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought}


def _sources(directory: Path) -> dict[str, str]:
    """Return the templates of a directory by name; template files take precedence over the settings."""
    root = root_of(directory)
    files = {DEFAULT: FILE} if (directory / FILE).exists() else {}
    files |= {Path(name).name.removesuffix(".jinja"): name for name in template_names(directory)}
    if files:
        return {name: read_bytes(directory / file, _MOST, inside=root).decode() for name, file in files.items()}
    settings = read_json(directory / SETTINGS, _MOST, inside=root) if (directory / SETTINGS).exists() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{SETTINGS} is no object in JSON")
    entries = settings.get("chat_template")
    if isinstance(entries, list):
        entries = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    by_name = entries if isinstance(entries, dict) else {DEFAULT: entries}
    return {name: source for name, source in by_name.items() if isinstance(name, str) and isinstance(source, str)}


class _Spans:
    """Character ranges between the tags of answers, in the text that a template is rendering."""

    def __init__(self) -> None:
        self.tagged = False
        self.begin()

    def begin(self) -> list[str]:
        """Begin a text; return the list to which its pieces are appended."""
        self._pieces, self.marked = list[str](), list[tuple[int, int]]()
        return self._pieces

    def mark(self, text: str) -> None:
        """Mark the text that is written next."""
        first = sum(map(len, self._pieces))
        self.marked.append((first, first + len(text)))


def special_tokens(directory: Path, field: str) -> dict[str, str]:
    """Return the texts of a tokenizer's special tokens by name; raise ``UserError`` for an unreadable file."""
    settings = tokenizer_settings(directory, field)
    extra = settings.get("extra_special_tokens")
    entries = {name: entry for name, entry in settings.items() if name.endswith("_token")}
    entries |= extra if isinstance(extra, dict) else {}
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it asks for more than {_GROWTH >> 20} MiB of memory"
    return " ".join(str(error).split())[:200]


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Bound the growth of the process, because a template of a few characters can allocate all memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        size = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except FileNotFoundError:  # /proc only exists on Linux
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (size + _GROWTH if soft < 0 else min(soft, size + _GROWTH), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _environment(spans: _Spans) -> "jinja2.Environment":
    """Return jinja's sandbox with the names that transformers gives a chat template."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tags around answers, as transformers reads them."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

        def parse(self, parser: Parser) -> nodes.Node:
            spans.tagged, line = True, next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            text: str = caller()
            spans.mark(text)
            return text

    class Names(Namespace):
        """Namespace that gives no access to the interpreter's attributes."""

        def __setitem__(self, name: str, value: object) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace has no {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": Names,
    }
    return environment
