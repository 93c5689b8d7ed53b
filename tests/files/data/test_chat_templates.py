"""Answers in the text of chat templates, of published ones as transformers marks them; tokens that they name."""

import json
import re
import tomllib
from pathlib import Path

import instruction_data
import pytest
import transformers
from instruction_data import TALK
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from axonn_jax.files.data.instructions.chat import ChatTemplate
from axonn_jax.files.data.instructions.marks import marked
from axonn_jax.files.data.instructions.schemas import Conversation, conversation_of
from axonn_jax.files.data.instructions.templates import Jinja, template_of

FILE = Path(__file__).parents[2] / "fixtures" / "chat_templates.toml"
TEXTS = tomllib.loads(FILE.read_text())
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
TALKS = {
    "tools": [("user", "q"), ("assistant", "I look", CALL), ("tool", "3"), ("assistant", "three")],
    "empty": [("user", "q"), ("assistant", "", CALL), ("tool", "3"), ("assistant", "three")],
    "null": [("user", "q"), ("assistant", None, CALL), ("tool", "3"), ("assistant", "three")],
    "two turns": [("user", "q1"), ("assistant", "a < b"), ("user", "q2"), ("assistant", "a1")],
    "system": [("system", "be short"), ("user", "q"), ("assistant", "a"), ("user", "q"), ("assistant", "a")],
    "long": [
        ("user", "q"),
        *[("assistant", "a"), ("user", ""), ("assistant", " b < c\n"), ("user", "q")] * 4,
        ("assistant", "a"),
    ],
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


@pytest.mark.parametrize("name", TEXTS["templates"])
def test_renderings_of_a_conversation_do_not_grow_with_it(monkeypatch, name):
    made, spans = [], ChatTemplate.spans
    monkeypatch.setattr(ChatTemplate, "spans", lambda *given, **options: made.append(1) or spans(*given, **options))
    form = Jinja(ChatTemplate(both(TEXTS["templates"][name])[1], TOKENS, "--template", name))
    for turns in (4, 12):
        talk = [{"role": role, "content": f"text {at}"} for at in range(turns) for role in ("user", "assistant")]
        form.passages(Conversation(talk), range(2 * turns))
        made.append(0)
    assert made.index(0) * 2 == len(made) - 2 < 32


def test_a_chat_is_what_transformers_makes_of_it(folder):
    """Ids and marks: the template says by its own tags which text is an answer."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    want = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = template_of("chat", folder)
    assert template.special
    (document,) = marked(tokenizer, [template.passages(Conversation(TALK), [1, 3])], [tokenizer.token_to_id("<s>")], 0)
    assert document.ids.tolist() == want["input_ids"]  # with one <s>, though --bos asks for one and the template has it
    assert document.counts.astype(int).tolist() == want["assistant_masks"]


def test_a_file_is_a_template_and_need_not_open_answers(folder, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n"
        "{% endfor %}"
    )
    template = template_of(str(tmp_path / "own.jinja"), folder)
    (passage,) = template.passages(Conversation(TALK), [1, 3])
    answers = [passage.text[begin:end] for begin, end in passage.marked]
    assert answers == [f"{TALK[at]['content'].strip()}<|endoftext|>\n" for at in (1, 3)]
    short = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "s"}]  # as in "assistant", "</s>"
    (passage,) = template.passages(Conversation(short), [1])
    assert [passage.text[begin:end] for begin, end in passage.marked] == ["s<|endoftext|>\n"]


FORMS = {  # as of models that many use: the text of a conversation with an answer between the marks
    "llama 2": (
        "{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        "<s>[INST] a [/INST] {s <|endoftext|>}<s>[INST] b [/INST] {t <|endoftext|>}",
    ),
    "llama 3": (
        "{% set loop_messages = messages %}{% for m in loop_messages %}"
        "{% set content = '<|h|>' + m['role'] + '<|e|>\n\n' + m['content'] | trim + '<|eot|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant<|e|>\n\n' }}{% endif %}",
        "<s><|h|>user<|e|>\n\na<|eot|><|h|>assistant<|e|>\n\n{s<|eot|>}<|h|>user<|e|>\n\nb<|eot|>"
        "<|h|>assistant<|e|>\n\n{t<|eot|>}",
    ),
    "deepseek-coder": (
        "{% set ns = namespace(found=false) %}{%- for m in messages %}"
        "{%- if m['role'] == 'system' %}{%- set ns.found = true %}{%- endif %}{%- endfor %}"
        "{{ bos_token }}{%- if not ns.found %}{{ 'You are an assistant.\n' }}{%- endif %}"
        "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'] + '\n' }}"
        "{%- else %}{{ '### Response:\n' + m['content'] + '\n<|EOT|>\n' }}{%- endif %}{%- endfor %}"
        "{% if add_generation_prompt %}{{ '### Response:' }}{% endif %}",
        "<s>You are an assistant.\n### Instruction:\na\n### Response:{\ns\n<|EOT|>\n}### Instruction:\nb\n"
        "### Response:{\nt\n<|EOT|>\n}",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_templates_in_use(tmp_path, form):
    source, want = FORMS[form]
    folder = instruction_data.tokenizer(tmp_path / "t", template=[{"name": "default", "template": source}])
    talk = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "asbt", strict=True)]
    (passage,) = template_of("chat", folder).passages(Conversation(talk), [1, 3])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert passage.text == theirs.apply_chat_template(talk, tokenize=False) == want.replace("{", "").replace("}", "")
    marks = {place for begin, end in passage.marked for place in range(begin, end)}
    clean = [(letter, inside) for letter, inside in zip(want, inside_of(want), strict=True) if letter not in "{}"]
    assert marks == {place for place, (_, inside) in enumerate(clean) if inside}


def inside_of(text):
    """Whether each character is between braces."""
    return [text.count("{", 0, at + 1) > text.count("}", 0, at + 1) for at in range(len(text))]


@pytest.mark.parametrize("template", ["alpaca", "own.jinja", "chat"])
def test_a_model_is_asked_by_the_template_of_its_training(folder, tmp_path, template):
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own + "{{ 'assistant: ' if add_generation_prompt }}")
    name = str(tmp_path / template) if "." in template else template
    rows = [{"prompt": f"q {n}", "completion": "a"} for n in range(9)]
    instruction_data.prepared(tmp_path, rows, folder, 96, template=name)
    asked, form = ChatTemplate.of(tmp_path / "out", "--chat", True), template_of(name, folder)
    for talk in (TALK, [{"role": "system", "content": "be short"}, *TALK]):
        passages = form.passages(Conversation(talk), [len(talk) - 1])
        end = "<|endoftext|>" if template == "alpaca" else ""
        assert asked.text(talk, answers=False) == "".join(passage.text + end for passage in passages)
        (begin, _), last = passages[-1].marked[0], passages[-1].text
        assert asked.text(talk[:-1]) == "".join(passage.text + end for passage in passages[:-1]) + last[:begin]


def test_conversations_whose_answers_do_not_show_are_counted(folder, tmp_path):
    own = "{{ (messages | map(attribute='content') | join | length) if messages | length > 2 }}"
    own += "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    rows = [{"messages": [TALK[0] | {"content": f"the {n}"}, *TALK[1 : 2 + 2 * (n % 4 == 0)]]} for n in range(16)]
    manifest, notes = instruction_data.prepared(tmp_path, rows, folder, 96, template=str(tmp_path / "own.jinja"))
    assert manifest.skipped["unmarked"] == 4
    assert "conversations whose answers the template's text does not show: 4 left out" in notes


NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token", "tool_token", "add_bos_token")
TEMPLATE = "{{ messages[0].content }}" + "".join(f"|{{{{ {name} }}}}" for name in NAMES)
OBJECT = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
OTHER = {"bos_token": "<b>", "eos_token": {"content": "<e>", **OBJECT}, "pad_token": None}
LISTED = {"added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True, **OBJECT}}}
CASES = {
    "one file": ({}, {}),
    "the map wins": ({}, {"special_tokens_map": OTHER}),
    "not where tokens are listed": (LISTED, {"special_tokens_map": OTHER}),
    "nor by null": (LISTED | {"bos_token": None}, {"special_tokens_map": OTHER}),
    "the map alone": ({"bos_token": None, "eos_token": None}, {"special_tokens_map": OTHER}),
    "objects": ({"eos_token": {"__type": "AddedToken", "content": "<e>", **OBJECT}}, {}),
    "added tokens alone": ({"eos_token": "<e>"}, {"added_tokens": {"<e>": 500}}),
    "both": ({"eos_token": "<x>"}, {"added_tokens": {"<e>": 500}, "special_tokens_map": OTHER}),
    "others by name": ({"image_token": "<i>", "add_bos_token": True}, {}),
    "extra by name": ({"extra_special_tokens": {"image_token": "<i>", "tool_token": "<t>"}}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_are_those_of_transformers(tmp_path, case):
    settings, files = CASES[case]
    folder = instruction_data.tokenizer(tmp_path / "t", template=TEMPLATE)
    given = json.loads((folder / "tokenizer_config.json").read_text())
    for name, content in {"tokenizer_config": given | {"pad_token": "<p>"} | settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    talk = [{"role": "user", "content": "x"}]
    want = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False)
    assert ChatTemplate.of(folder, "--chat", True).text(talk, answers=False) == want


@pytest.mark.parametrize("own", [True, False], ids=["with a template", "without"])
def test_the_template_is_the_tokenizers_own_where_it_has_one(tmp_path, own):
    tokenizer = instruction_data.tokenizer(tmp_path / "tok", template=instruction_data.CHATML if own else None)
    manifest, notes = instruction_data.prepared(tmp_path, [{"messages": TALK}] * 2, tokenizer, 128, 0, template="")
    used = manifest.options["template"]
    assert used == ("chat" if own else "alpaca")
    assert notes[0].startswith(f"template: {used}, ")
