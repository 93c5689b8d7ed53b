"""Schemas of instruction data: rows as others write them, their marks, and rows of no use."""

import json
from collections import Counter

import instruction_data
import pytest
from instruction_data import TALK, all_documents, documents
from tokenizers import Tokenizer

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.instructions.schemas import conversation_of, conversations
from axonn_jax.files.data.instructions.templates import Alpaca, template_of
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.files.data.loader import TokenSamples


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"question": "q", "answer": "a", "id": 3}, [("user", "q"), ("assistant", "a")]),
        ({"problem": "q", "solution": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "", "response": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"instruction": "q", "input": "i", "output": "a"}, [("user", "q\n\ni"), ("assistant", "a")]),
        ({"prompt": "q", "completion": "a", "input": "i"}, [("user", "q"), ("assistant", "a")]),
        ({"prompt": "p", "messages": TALK[:2]}, [(m["role"], m["content"]) for m in TALK[:2]]),
    ],
)
def test_schemas(row, want):
    conversation, used = conversation_of(row)
    assert [(message["role"], message["content"]) for message in conversation.messages] == want
    assert used == row.keys() - {"id"} - ({"input"} if "completion" in row else set()) - (
        {"prompt"} if "messages" in row else set()
    )


def answers(row, template=None):
    """Texts of the answers that count."""
    conversation, _ = conversation_of(row)
    passages = (template or Alpaca()).passages(conversation, conversation.trained)
    return [passage.text[begin:end] for passage in passages for begin, end in passage.marked]


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"messages": [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 1}]}, ["its token\n"]),
        ({"messages": [TALK[0], TALK[1], TALK[2], TALK[3] | {"train": False}]}, [TALK[1]["content"]]),
        ({"messages": [TALK[0] | {"loss_mask": 0}, TALK[1] | {"loss_mask": 0}, *TALK[2:]]}, ["its token\n"]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, ["a"]),
        ({"prompt": TALK[:3], "completion": TALK[3:]}, ["its token\n"]),
        ({"messages": [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}]}, ["aa"]),
        ({"messages": [TALK[0] | {"input": "i", "instruction": "x"}, TALK[1]]}, [TALK[1]["content"]]),
    ],
)
def test_marks_of_messages_and_schemas_of_others(folder, row, want):
    assert answers(row) == want
    chat = [text.removesuffix("<|im_end|>\n") for text in answers(row, template_of("chat", folder))]
    assert chat == want


@pytest.mark.parametrize("loss", ["response", "all"])
def test_tokens_of_a_turn_that_is_left_out_do_not_count(folder, tmp_path, loss):
    talk = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    rows = [{"messages": [TALK[0] | {"content": f"the {n}"}, *talk[1:]]} for n in range(8)]
    manifest, _ = instruction_data.prepared(tmp_path, rows, folder, 128, loss=loss)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for ids, marks in all_documents(manifest, 128):
        text = tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark])
        assert "return" not in text
        assert ("mesh" in text) == (loss == "all")
        assert "its token" in text
        assert [marks[at] for at, token in enumerate(ids) if token == end] == [False, True]


def test_with_all_tokens_a_prompts_answers_count_and_other_turns_take_no_mark(folder, tmp_path):
    rows = [{"prompt": [TALK[0] | {"content": f"the {n}"}, *TALK[1:3]], "completion": TALK[3:]} for n in range(8)]
    manifest, _ = instruction_data.prepared(tmp_path, rows, folder, 128, loss="all")
    for ids, marks in all_documents(manifest, 128):
        assert all(marks[1:]), ids
    rows = [{"messages": [TALK[0] | {"content": f"the {n}", "weight": 0}, *TALK[1:]]} for n in range(8)]
    with pytest.raises(UserError, match="marks of 0 on the assistant's messages alone"):
        instruction_data.prepared(tmp_path, rows, folder, 128, loss="all")


def test_keys_of_messages_are_read_by_the_template_or_listed(folder, tmp_path):
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    asked = {"role": "user", "content": "the grid", "name": "x"}
    talk = [asked, {"role": "assistant", "content": "mesh", "reasoning_content": "because", "tool_calls": [{"f": 1}]}]
    rows = [{"id": n, "messages": [asked | {"content": f"the {n}"}, *talk[1:]]} for n in range(8)]
    for template, listed in (
        (str(tmp_path / "own.jinja"), ["id", "name of messages", "tool_calls of messages"]),
        ("alpaca", ["id", "name of messages", "reasoning_content of messages", "tool_calls of messages"]),
    ):
        _, notes = instruction_data.prepared(tmp_path, rows, folder, 96, template=template)
        assert notes[0] == f"keys not read: {', '.join(f'{key} (8 rows)' for key in listed)}"


def test_a_file_of_held_out_conversations(folder, tmp_path):
    rows = [{"prompt": f"the {n}", "completion": "grid"} for n in range(12)]
    source, valid = (instruction_data.write(tmp_path / f"{at}.jsonl", rows[at : at + 6]) for at in (0, 6))
    given = (tmp_path / "out", InstructionOptions(128, valid=valid))
    manifest, _ = prepare_instructions(source, *given, tokenizer=folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for split, own in (("train", range(6)), ("valid", range(6, 12))):
        samples = TokenSamples(manifest.path, split, 128)
        texts = [
            tokenizer.decode(ids) for at in range(len(samples)) for ids, marks in documents(samples[at]) if any(marks)
        ]
        assert len(texts) == 6
        assert all(any(f"the {n}\n" in text for text in texts) for n in own)
    options = InstructionOptions(128, valid=tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"^--valid = '.*none.jsonl'"):
        prepare_instructions(source, tmp_path / "other", options, tokenizer=folder)


@pytest.mark.parametrize("template", ["alpaca", "chat"])
@pytest.mark.parametrize("loss", ["response", "all"])
def test_a_text_is_trained_on_as_it_is(folder, tmp_path, template, loss):
    rows = [{"text": f"the grid {n}" + "<|endoftext|>" * (n % 2)} for n in range(8)]
    manifest, _ = instruction_data.prepared(tmp_path, rows, folder, 32, template=template, loss=loss)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    want = [[*tokenizer.encode(f"the grid {n}", add_special_tokens=False).ids, end] for n in range(8)]
    made = all_documents(manifest, 32)
    assert sorted(list(ids) for ids, _ in made) == sorted(want)
    assert all(all(marks) for _, marks in made)


def test_rows_of_parquet_are_those_of_json(folder, tmp_path):
    arrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    call = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    rows = [
        {"id": n, "messages": [*TALK[:1], TALK[1] | {"weight": n % 2}, {"role": "user", "content": f"{n}"}, *TALK[3:]]}
        for n in range(20)
    ]
    rows += [{"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": call}, TALK[3]]}]
    other = [{"function": {"name": "g", "arguments": {"y": {"z": [2]}}}}]  # a table gives each row the others' columns
    rows.insert(0, {"id": 0, "messages": [TALK[0], TALK[1] | {"tool_calls": other}], "tools": [{"name": "g"}]})
    table.write_table(arrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    instruction_data.write(tmp_path / "data.jsonl", rows)
    made = []
    for name in ("data.parquet", "data.jsonl"):
        options = InstructionOptions(128, template="chat")
        given = (tmp_path / name, tmp_path / "out", options)
        manifest, notes = prepare_instructions(*given, tokenizer=folder, holdout=0.2, force=True)
        read = conversations(tmp_path / name, "SOURCE", Counter(), lambda key: True, set())
        made.append((sorted(all_documents(manifest, 128)), notes, [talk.text for _, talk in read]))
    assert made[0] == made[1]


def test_bad_rows_are_left_out_and_named(folder, tmp_path):
    lines = [json.dumps({"prompt": f"the {n}", "completion": "grid"}) for n in range(20)]
    bad = ['{"prompt": 1}', "[]", '{"prompt": "x", "completion": "\\ud800"}', '{"messages": [{"role": "\\udc00"}]}']
    asked = '{"messages": [{"role": "user", "content": "x"}, '
    bad += [asked + '{"role": "assistant", "content": "y", "weight": 0.5}]}'] * 2
    bad += [asked + '{"role": "user", "content": "y"}]}']
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join([*lines, *bad, ""]).encode())
    options = InstructionOptions(96, skip_bad=True)
    manifest, notes = prepare_instructions(
        tmp_path / "data.jsonl", tmp_path / "out", options, tokenizer=folder, holdout=0.2
    )
    assert manifest.skipped["bad"] == 7
    assert sum(split.documents for split in manifest.splits.values()) == 20
    at = notes.index("rows of no use: 7 left out")
    assert [note.partition(": ")[0].rpartition(", ")[2] for note in notes[at + 1 : at + 6]] == [
        f"line {number}" for number in range(21, 26)
    ]
    assert "text that UTF-8 can express" in notes[at + 3]
    assert "0, 1, false or true as the 'weight' of a message; this is 0.5" in notes[at + 5]
