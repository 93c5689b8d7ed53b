"""Instruction data: conversations become packed rows whose targets are the answers' tokens, and none besides."""

import json
from collections import Counter
from itertools import pairwise

import instruction_data
import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from axonn_jax.cli.main import main
from axonn_jax.data.instructions.chat import ChatTemplate
from axonn_jax.data.instructions.marks import marked
from axonn_jax.data.instructions.pack import WINDOW, MarkedTokens, Packer, first_fit
from axonn_jax.data.instructions.schemas import Conversation, conversation_of
from axonn_jax.data.instructions.templates import Alpaca, template_of
from axonn_jax.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.data.loader import Loader, TokenSamples
from axonn_jax.data.manifest import Manifest
from axonn_jax.errors import UserError
from axonn_jax.models.packed import counted, token_ids

SEQ = 48
TALK = [
    {"role": "user", "content": "int  x"},
    {"role": "assistant", "content": "  return  x;\n  é🙂 the grid"},
    {"role": "user", "content": "and the mesh"},
    {"role": "assistant", "content": "its token\n"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return instruction_data.tokenizer(tmp_path_factory.mktemp("instructions") / "tokenizer")


@pytest.fixture(scope="module")
def prepared(folder):
    source = instruction_data.write(folder.parent / "data.jsonl", instruction_data.rows(300))
    manifest, notes = prepare_instructions(
        source, folder.parent / "out", InstructionOptions(SEQ, mix=[]), tokenizer=folder, holdout=0.2
    )
    assert notes[0] == "keys not read: lang (100 rows)"
    assert notes[-1] == "conversations begin without <s>, the tokenizer's begin token: --bos adds it"
    return manifest


def documents(words):
    """Ids and marks of the documents of a row, by the bits of its words."""
    starts = [at for at, word in enumerate(words) if word < 0] + [len(words)]
    assert starts[0] == 0
    return [
        ([int(word) & 0xFFFFFF for word in words[a:b]], [bool(int(word) >> 30 & 1) for word in words[a:b]])
        for a, b in pairwise(starts)
    ]


def all_documents(manifest, seq=SEQ):
    """Every document of both splits but padding, as its ids, and what counts in it."""
    found = []
    for split in ("train", "valid"):
        samples = TokenSamples(manifest.path, split, seq, verify=True)
        for row in range(len(samples)):
            found += [(tuple(ids), tuple(marks)) for ids, marks in documents(samples[row]) if any(marks)]
    return found


def alpaca(row, tokenizer):
    """Ids and marks of a row, written down by hand: each turn is encoded alone and ends with the end token."""
    if "messages" in row:
        texts = [message["content"] for message in row["messages"]]
        turns = [(asked, None, answered) for asked, answered in zip(texts[::2], texts[1::2], strict=True)]
    else:
        question, answer = (
            row[key] for key in (("prompt", "completion") if "prompt" in row else ("instruction", "output"))
        )
        turns = [(question, row.get("input"), answer)]
    begin = "Below is an instruction that describes a task"
    begin += ", paired with an input that provides further context" if turns[0][1] else ""
    begin += ". Write a response that appropriately completes the request."
    ids, marks = [], []
    for question, more, answer in turns:
        head = f"{begin}\n\n### Instruction:\n{question}\n\n" + (f"### Input:\n{more}\n\n" if more else "")
        head += "### Response:\n"
        begin = ""
        encoding = tokenizer.encode(head + answer, add_special_tokens=False)
        ids += [*encoding.ids, tokenizer.token_to_id("<|endoftext|>")]
        marks += [*(behind > len(head) for _, behind in encoding.offsets), True]
    return tuple(ids), tuple(marks)


def test_rows_hold_every_conversation_once_with_its_answers_marked(prepared, folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    every = [alpaca(row, tokenizer) for row in instruction_data.rows(300)]
    fits = [document for document in every if len(document[0]) <= SEQ + 1]
    assert len(every) - len(fits) == prepared.skipped["too_long"] > 10
    assert Counter(all_documents(prepared)) == Counter(fits)
    assert sum(split.documents for split in prepared.splits.values()) == len(fits)


def test_the_manifest_says_what_is_there(prepared):
    assert Manifest.load(prepared.path).as_json() == prepared.as_json()
    assert (prepared.version, prepared.kind, prepared.row, prepared.dtype) == (2, "rows", SEQ + 1, "uint32")
    for name, split in prepared.splits.items():
        samples = TokenSamples(prepared.path, name, SEQ)
        rows = np.stack([samples[at] for at in range(len(samples))])
        assert rows.dtype == np.int32
        assert split.counted == counted(rows).sum() > 0
        padding = sum(len(ids) for row in rows for ids, marks in documents(row) if not any(marks))
        assert split.padding == padding
        assert split.fill == 1 - padding / rows.size
    counts = np.bincount(token_ids(rows[:, 1:])[counted(rows)])
    share = counts[counts > 0] / counts.sum()
    assert prepared.unigram_entropy == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)


def test_batches_are_whole_rows_on_any_number_of_processes(prepared):
    def batches(rows, start=0, count=6):
        loader = Loader(prepared.path, seq_len=SEQ, global_batch=4, rows=rows, seed=3, position=start)
        taken = [next(loader) for _ in range(count)]
        loader.close()
        return taken

    whole, halves = batches(None), zip(batches([0, 1]), batches([2, 3]), strict=True)
    np.testing.assert_array_equal(np.stack(whole), np.stack([np.concatenate(pair) for pair in halves]))
    np.testing.assert_array_equal(np.stack(batches(None, start=12, count=3)), np.stack(whole[3:]))
    samples = TokenSamples(prepared.path, "train", SEQ)
    split = {samples[at].tobytes() for at in range(len(samples))}
    assert {row.tobytes() for batch in whole for row in batch} <= split


def test_goldfish_sees_packed_rows(prepared):
    from axonn_jax.data.goldfish import GoldfishConfig, goldfish

    options = {"seq_len": SEQ, "global_batch": 4, "prefetch": 0}
    plain, dropped = (Loader(prepared.path, **options, dropped=GoldfishConfig(k, h)) for k, h in ((0, 13), (2, 3)))
    batch, marked_batch = next(plain), next(dropped)
    np.testing.assert_array_equal(marked_batch, goldfish(batch, 2, 3, packed=True))
    np.testing.assert_array_equal(token_ids(marked_batch), token_ids(batch))
    assert counted(marked_batch).sum() < 0.8 * counted(batch).sum()


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


@pytest.mark.parametrize("kind", [{}, {"trim": True}, {"spaces": True}], ids=str)
@pytest.mark.parametrize("answer", ["return x;", "  return", " the", "\n\n  x", "é🙂", "x  ", " "])
def test_marks_are_exact_at_the_boundary(tmp_path, kind, answer):
    """A token counts if the text up to its end is longer than the question: compared with decoding, not offsets."""
    tokenizer = Tokenizer.from_file(str(instruction_data.tokenizer(tmp_path / "t", **kind) / "tokenizer.json"))
    messages = [{"role": "user", "content": "int"}, {"role": "assistant", "content": answer}]
    (passage,) = Alpaca().passages(Conversation(messages), [1])
    (document,) = marked(tokenizer, [[passage]], [], 3)
    (begin, end), ids = passage.marked[0], document.ids.tolist()
    assert (passage.text[begin:end], ids[-1], document.counts[-1]) == (answer, 3, True)
    if "spaces" in kind:
        prefix = [tokenizer.decode(ids[: at + 1]).encode() for at in range(len(ids) - 1)]
    else:
        pieces = [bytes_of(tokenizer.id_to_token(token)) for token in ids[:-1]]
        prefix = [b"".join(pieces[: at + 1]) for at in range(len(pieces))]
        assert prefix[-1] == passage.text.encode()
    question = len(passage.text[:begin].encode())
    if "spaces" not in kind or answer.strip() == answer:
        assert document.counts[:-1].tolist() == [len(text) > question for text in prefix]


def bytes_of(piece):
    """Bytes of a piece of a byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return bytes(table[letter] for letter in piece)


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
    source = instruction_data.write(tmp_path / "data.jsonl", rows)
    options = InstructionOptions(128, loss=loss)
    manifest, _ = prepare_instructions(source, tmp_path / "out", options, tokenizer=folder, holdout=0.3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for ids, marks in all_documents(manifest, 128):
        text = tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark])
        assert "return" not in text
        assert ("mesh" in text) == (loss == "all")
        assert "its token" in text
        assert [marks[at] for at, token in enumerate(ids) if token == end] == [False, True]


@pytest.mark.parametrize("template", ["alpaca", "own.jinja", "chat"])
def test_a_model_is_asked_by_the_template_of_its_training(folder, tmp_path, template):
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own + "{{ 'assistant: ' if add_generation_prompt }}")
    source = instruction_data.write(
        tmp_path / "data.jsonl", [{"prompt": f"q {n}", "completion": "a"} for n in range(9)]
    )
    name = str(tmp_path / template) if "." in template else template
    prepare_instructions(source, tmp_path / "out", InstructionOptions(96, name), tokenizer=folder, holdout=0.3)
    asked, form = ChatTemplate.of(tmp_path / "out", "--chat", True), template_of(name, folder)
    for talk in (TALK, [{"role": "system", "content": "be short"}, *TALK]):
        passages = form.passages(Conversation(talk), [len(talk) - 1])
        end = "<|endoftext|>" if template == "alpaca" else ""
        assert asked.text(talk, answers=False) == "".join(passage.text + end for passage in passages)
        (begin, _), last = passages[-1].marked[0], passages[-1].text
        assert asked.text(talk[:-1]) == "".join(passage.text + end for passage in passages[:-1]) + last[:begin]


def test_keys_of_messages_are_read_by_the_template_or_listed(folder, tmp_path):
    own = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.reasoning_content }}\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    asked = {"role": "user", "content": "the grid", "name": "x"}
    talk = [asked, {"role": "assistant", "content": "mesh", "reasoning_content": "because", "tool_calls": [{"f": 1}]}]
    rows = [{"id": n, "messages": [asked | {"content": f"the {n}"}, *talk[1:]]} for n in range(8)]
    source = instruction_data.write(tmp_path / "data.jsonl", rows)
    for template, listed in (
        (str(tmp_path / "own.jinja"), ["id", "name of messages", "tool_calls of messages"]),
        ("alpaca", ["id", "name of messages", "reasoning_content of messages", "tool_calls of messages"]),
    ):
        options = InstructionOptions(96, template=template)
        _, notes = prepare_instructions(source, tmp_path / "out", options, tokenizer=folder, holdout=0.3, force=True)
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
    source = instruction_data.write(tmp_path / "data.jsonl", rows)
    options = InstructionOptions(32, template, loss)
    manifest, _ = prepare_instructions(source, tmp_path / "out", options, tokenizer=folder, holdout=0.3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    want = [[*tokenizer.encode(f"the grid {n}", add_special_tokens=False).ids, end] for n in range(8)]
    made = all_documents(manifest, 32)
    assert sorted(list(ids) for ids, _ in made) == sorted(want)
    assert all(all(marks) for _, marks in made)


def test_rows_of_parquet_are_those_of_json(folder, tmp_path):
    arrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    call = [{"function": {"name": "f"}}]
    rows = [
        {"id": n, "messages": [*TALK[:1], TALK[1] | {"weight": n % 2}, {"role": "user", "content": f"{n}"}, *TALK[3:]]}
        for n in range(20)
    ]
    rows += [{"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": call}, TALK[3]]}]
    table.write_table(arrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    instruction_data.write(tmp_path / "data.jsonl", rows)
    made = []
    for name in ("data.parquet", "data.jsonl"):
        options = InstructionOptions(128, template="chat")
        given = (tmp_path / name, tmp_path / "out", options)
        manifest, notes = prepare_instructions(*given, tokenizer=folder, holdout=0.2, force=True)
        made.append((sorted(all_documents(manifest, 128)), notes))
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


def test_conversations_whose_answers_do_not_show_are_counted(folder, tmp_path):
    own = "{{ (messages | map(attribute='content') | join | length) if messages | length > 2 }}"
    own += "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    rows = [{"messages": [TALK[0] | {"content": f"the {n}"}, *TALK[1 : 2 + 2 * (n % 4 == 0)]]} for n in range(16)]
    source = instruction_data.write(tmp_path / "data.jsonl", rows)
    options = InstructionOptions(96, template=str(tmp_path / "own.jinja"))
    manifest, notes = prepare_instructions(source, tmp_path / "out", options, tokenizer=folder, holdout=0.3)
    assert manifest.skipped["unmarked"] == 4
    assert "conversations whose answers the template's text does not show: 4 left out" in notes


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_first_fit_decreasing(lengths):
    """As by the definition, one row at a time; and so at most 11/9 of the best and 6/9 rows."""
    want = []
    for at in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        for row in want:
            if sum(lengths[i] for i in row) + lengths[at] <= 64:
                row.append(at)
                break
        else:
            want.append([at])
    assert first_fit(lengths, 64) == want


def skewed(count):
    """Lengths of instruction data: most short, some hundreds of times longer."""
    return np.random.default_rng(1).lognormal(5.0, 0.9, count).astype(int).clip(20, 2049)


def test_fill_of_skewed_lengths_is_at_least_97_percent():
    lengths, packer = skewed(20_000), Packer(2049)
    rows = []
    for number, length in enumerate(lengths):
        rows += packer.add(MarkedTokens(np.full(length, number, np.uint32), np.ones(length, bool), 0))
    rows += packer.rest()
    used = [sum(len(document.ids) for document in row) for row in rows]
    assert sorted(document.ids[0] for row in rows for document in row) == list(range(len(lengths)))
    assert max(used) <= 2049
    assert sum(used) / (2049 * len(rows)) >= 0.97
    assert len(lengths) > 10 * WINDOW


def run(*argv):
    assert main([*map(str, argv)]) == 0


def test_all_targets_cut_and_mixed(folder, tmp_path, capsys):
    """A file of weight 2.5 comes 2 or 3 times, what is held out once, and what is too long is cut."""
    source = instruction_data.write(tmp_path / "a.jsonl", instruction_data.rows(30, seed=1))
    more = instruction_data.rows(40, seed=2)
    instruction_data.write(tmp_path / "b.jsonl", more)
    argv = ["prepare", "--instructions", source, tmp_path / "out", "--tokenizer", folder, "--seq-len", SEQ]
    argv += ["--mix", f"{tmp_path / 'b.jsonl'}:2.5", "--loss", "all", "--too-long", "cut", "--holdout", 0.3, "--bos"]
    run(*argv, "--json")
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "keys not read: lang (24 rows)" in err
    assert result["splits"]["train"]["fill"] > 0.7
    manifest = Manifest.load(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    times = Counter(ids for ids, _ in all_documents(manifest))
    for row in instruction_data.rows(30, seed=1):
        assert times[(0, *alpaca(row, tokenizer)[0])[: SEQ + 1]] == 1
    seen = [times[(0, *alpaca(row, tokenizer)[0])[: SEQ + 1]] for row in more]
    assert {*seen} == {1, 2, 3}
    assert seen.count(3) + seen.count(2) == pytest.approx(0.7 * len(more), abs=8)
    assert manifest.skipped["cut"] > 0
    assert all(all(marks) for _, marks in all_documents(manifest))


def test_a_vocabulary_of_150_000(tmp_path):
    folder = instruction_data.tokenizer(tmp_path / "t")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 149_999, "content": "<|last|>"})
    raw["model"]["vocab"]["<|last|>"] = 149_999
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    rows = [{"prompt": f"the {n}", "completion": "grid<|last|>mesh"} for n in range(8)]
    source = instruction_data.write(tmp_path / "data.jsonl", rows)
    options = InstructionOptions(64, template="chat", bos=True)
    manifest, _ = prepare_instructions(source, tmp_path / "out", options, tokenizer=folder, holdout=0.3)
    assert manifest.vocab == 150_000
    batch = next(Loader(tmp_path / "out", seq_len=64, global_batch=2, prefetch=0))
    assert 149_999 in token_ids(batch[:, 1:])[counted(batch)]
