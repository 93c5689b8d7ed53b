"""Answers in the text of published chat templates: with tags as transformers marks them, and the same without."""

import re
import tomllib
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from axonn_jax.data.instructions.chat import ChatTemplate
from axonn_jax.data.instructions.schemas import conversation_of
from axonn_jax.data.instructions.templates import Jinja

FILE = Path(__file__).parents[1] / "fixtures" / "chat_templates.toml"
TEXTS = tomllib.loads(FILE.read_text())
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TALKS = {
    "tools": [("user", "q"), ("assistant", "I look", CALL), ("tool", "3"), ("assistant", "three")],
    "empty": [("user", "q"), ("assistant", "", CALL), ("tool", "3"), ("assistant", "three")],
    "null": [("user", "q"), ("assistant", None, CALL), ("tool", "3"), ("assistant", "three")],
    "two turns": [("user", "q1"), ("assistant", "a < b"), ("user", "q2"), ("assistant", "a1")],
    "system": [("system", "be short"), ("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a")],
    "reasoning": [
        ("user", "q1"),
        ("assistant", "<think>\nt1\n</think>\n\na1"),
        ("user", "q2"),
        ("assistant", "<think>\nt2\n</think>\n\na2"),
    ],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def talk_of(name):
    messages = [
        {"role": role, "content": content} | ({"tool_calls": calls[0]} if calls else {})
        for role, content, *calls in TALKS[name]
    ]
    tools = [{"type": "function", "function": {"name": "f"}}] if name in ("tools", "empty", "null") else None
    return conversation_of({"messages": messages, "tools": tools})[0]


def both(source):
    """The template with tags around its answers, and without."""
    for name in ("CALLS", "TOOLS"):
        source = source.replace(name, TEXTS[name])
    source = source.replace("\n", "")
    tags = {"[[": "{% generation %}", "]]": "{% endgeneration %}"}
    return re.sub(r"\[\[|\]\]", lambda mark: tags[mark[0]], source), re.sub(r"\[\[|\]\]", "", source)


@pytest.mark.parametrize("name", TEXTS["templates"])
def test_answers_are_marked_as_by_tags(name):
    tagged, bare = both(TEXTS["templates"][name])
    for kind in TALKS:
        conversation = talk_of(kind)
        given = (conversation.messages, conversation.tools, None, False)
        text, want = _render_with_assistant_indices(_compile_jinja_template(tagged), *given, **TOKENS)
        for source in (tagged, bare):
            if source is bare and name == "phi 3":  # the end of the text is the last answer's
                want = [*want[:-1], (want[-1][0], len(text))]
            (passage,) = Jinja(ChatTemplate(source, TOKENS, "--template", name)).passages(
                conversation, conversation.trained
            )
            assert passage.text == text
            assert [text[a:b] for a, b in passage.marked] == [text[a:b] for a, b in want], (kind, source is bare)
            assert list(passage.marked) == want, (kind, source is bare)
