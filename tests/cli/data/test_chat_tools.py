"""Tools in chats: texts of published templates as transformers makes them, also where a model has several templates."""

import json
import tomllib
from pathlib import Path

import instruction_data
import pytest
import transformers

from axonn_jax.cli.generate import Generate
from axonn_jax.cli.generate.texts import prompts_of
from axonn_jax.core.errors import UserError
from axonn_jax.files.data.instructions.chat import ChatTemplate
from axonn_jax.files.data.instructions.schemas import conversation_of
from axonn_jax.files.data.tokenize import load

FILE = Path(__file__).parents[2] / "fixtures" / "chat_templates.toml"
TEMPLATES = tomllib.loads(FILE.read_text())["tools"]
SEVERAL = [name for name, sources in TEMPLATES.items() if len(sources) > 1]
CASES = [(name, "settings") for name in TEMPLATES] + [(name, "files") for name in SEVERAL]
PLACE = {"type": "string", "description": "a <place> & its \u00e9tat"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name} of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": PLACE, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "traffic")
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"place": "Z\u00fcrich"}}}
CALLED = [
    {"role": "user", "content": "the grid?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"rain": 3}', "tool_call_id": "abcdefghi", "name": "weather"},
    {"role": "assistant", "content": "of a mesh"},
]
PLAIN = [{"role": "user", "content": "the shard?"}, {"role": "assistant", "content": "its token"}]
SYSTEM = [{"role": "system", "content": "be short"}]
ROWS = [
    {"messages": CALLED, "tools": TOOLS},
    {"messages": [*SYSTEM, *CALLED], "tools": json.dumps(TOOLS[:1])},
    {"messages": PLAIN, "tools": TOOLS},
    {"messages": PLAIN, "tools": []},
    {"messages": CALLED[:1] + PLAIN[1:], "tools": None},
    {"messages": [*SYSTEM, *PLAIN], "tools": ""},
    {"messages": [*SYSTEM, *PLAIN]},
    {"messages": [CALLED[0], {**CALLED[1], "reasoning": "the rain"}, *CALLED[2:]], "tools": TOOLS},
]


def tokenizer(folder, sources, place):
    """A tokenizer's directory with templates by name, in one of the two places that transformers reads."""
    if place == "settings":
        listed = [{"name": name, "template": source} for name, source in sources.items()]
        return instruction_data.tokenizer(folder, template=listed if len(listed) > 1 else sources["default"])
    instruction_data.tokenizer(folder, template="{{ 'not this' }}")
    for name, source in sources.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return folder


def texts(folder, rows, **options):
    """What transformers makes of the rows, whose tools may be in JSON."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    tools = [
        json.loads(row.get("tools") or "null") if isinstance(row.get("tools"), str) else row.get("tools")
        for row in rows
    ]
    pairs = zip(rows, tools, strict=True)
    return [
        theirs.apply_chat_template(row["messages"], tools=given, return_dict=False, **options) for row, given in pairs
    ]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_chats_with_tools_are_those_of_transformers(tmp_path, name, place):
    """Prepared, and as questions to a model that has the templates of its training."""
    folder = tokenizer(tmp_path / "t", TEMPLATES[name], place)
    manifest, notes = instruction_data.prepared(tmp_path, ROWS, folder, 1500, template="chat", loss="all")
    read = "reasoning_content" in TEMPLATES[name]["default"]
    assert any("reasoning of messages (1 rows)" in note for note in notes) != read
    found = sorted(list(ids) for ids, _ in instruction_data.all_documents(manifest, 1500))
    want = texts(folder, ROWS)
    assert found == sorted(want)
    asked = [row | {"messages": row["messages"][:-1]} for row in ROWS]
    instruction_data.write(tmp_path / "asked.jsonl", asked)
    out = tmp_path / "out"
    given = prompts_of(
        Generate(out, chat=True, prompts=tmp_path / "asked.jsonl"), load(out / "tokenizer.json"), 4096, 1 << 20
    )
    assert [list(prompt.ids) for prompt in given] == texts(folder, asked, add_generation_prompt=True)
    assert texts(out, ROWS) == want


def test_the_folder_of_templates_stands_in_the_place_of_others(tmp_path):
    """Of one name the file there counts; templates of the settings are not looked at."""
    sources = {"default": "{{ 'one' }}", "tool_use": "{{ 'with tools' }}"}
    folder = tokenizer(tmp_path / "t", sources, "files")
    for changed, source in (("default", "{{ 'another' }}"), ("rag", "{{ 'unasked' }}")):
        (folder / "additional_chat_templates" / f"{changed}.jinja").write_text(source)
        rows = [{"messages": PLAIN, "tools": tools} for tools in (TOOLS, [], None)]
        conversations = [conversation_of(row)[0] for row in rows]
        template = ChatTemplate.of(folder, "--chat", True)
        made = [template.text(each.messages, each.tools, answers=False) for each in conversations]
        assert made == texts(folder, rows, tokenize=False) == ["with tools", "with tools", "another"]


def test_rows_of_another_template_leave_none_of_the_model_beside_it(tmp_path):
    folder = tokenizer(tmp_path / "t", TEMPLATES["hermes 3"], "files")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}")
    kept = []
    for template in ("chat", str(tmp_path / "own.jinja")):
        instruction_data.prepared(tmp_path, ROWS, folder, 1500, template=template, loss="all")
        kept.append((tmp_path / "out" / "additional_chat_templates").exists())
    assert kept == [True, False]
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == (tmp_path / "own.jinja").read_text()


def test_templates_for_tools_alone_need_tools(tmp_path):
    folder = tokenizer(tmp_path / "t", {"tool_use": "{{ tools | length }}", "rag": ""}, "files")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = ChatTemplate.of(folder, "--chat", True)
    assert template.text(PLAIN, TOOLS) == "2"
    with pytest.raises(
        UserError, match="a conversation with tools: of the model's templates there is 'tool_use', no 'def"
    ):
        template.text(PLAIN)
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("x")
    with pytest.raises(
        UserError, match=r"--chat = True: a model whose tokenizer has a chat template; .* has rag alone, no d"
    ):
        ChatTemplate.of(folder, "--chat", True)


def test_tools_that_a_template_does_not_take_are_told(tmp_path, capsys):
    folder = instruction_data.tokenizer(tmp_path / "t")
    rows = [{"messages": [PLAIN[0], {"role": "assistant", "content": f"the {n}"}], "tools": TOOLS} for n in range(8)]
    for template in ("chat", "alpaca"):
        _, notes = instruction_data.prepared(tmp_path, [*rows, *ROWS[3:7]], folder, 200, template=template)
        assert "keys not read: tools (8 rows)" in notes
    path = instruction_data.write(tmp_path / "asked.jsonl", [rows[0], *ROWS[3:7]])
    prompts_of(Generate(folder, chat=True, prompts=path), load(folder / "tokenizer.json"), 4096, 1 << 20)
    assert capsys.readouterr().err == "warning: lines with tools that the chat template does not take: 1\n"


@pytest.mark.parametrize("tools", [{}, 0, "{}", [1], "[", {"a": 1}])
def test_what_is_no_list_of_tools_names_its_line(tmp_path, tools):
    folder = tokenizer(tmp_path / "t", TEMPLATES["qwen 2.5"], "settings")
    path = instruction_data.write(tmp_path / "asked.jsonl", [{"messages": PLAIN}, {"prompt": "x", "tools": tools}])
    with pytest.raises(UserError, match=r"^--prompts = '.*asked\.jsonl, line 2': tools as a list of objects"):
        prompts_of(Generate(folder, chat=True, prompts=path), load(folder / "tokenizer.json"), 4096, 1 << 20)
