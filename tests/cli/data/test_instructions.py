"""Instruction data: conversations become packed rows whose targets are the answers' tokens, and none besides."""

import json
from collections import Counter

import instruction_data
import numpy as np
import pytest
from damage import edit_json
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_data import all_documents, documents
from tokenizers import Tokenizer

from axonn_jax.cli.main import main
from axonn_jax.core.models.packed import counted_targets, token_ids
from axonn_jax.files.data.instructions.marks import marked
from axonn_jax.files.data.instructions.pack import WINDOW, MarkedTokens, Packer, first_fit
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import Alpaca
from axonn_jax.files.data.loader import Loader, TokenSamples
from axonn_jax.files.data.manifest import Manifest

SEQ = 48


@pytest.fixture(scope="module")
def prepared(folder):
    manifest, notes = instruction_data.prepared(folder.parent, instruction_data.rows(300), folder, SEQ, 0.2, mix=[])
    assert notes[0] == "keys not read: lang (100 rows)"
    assert notes[-1] == "conversations begin without <s>, the tokenizer's begin token: --bos adds it"
    return manifest


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
    assert Counter(all_documents(prepared, SEQ)) == Counter(fits)
    assert sum(split.documents for split in prepared.splits.values()) == len(fits)


def test_the_manifest_says_what_is_there(prepared):
    assert Manifest.load(prepared.path).as_json() == prepared.as_json()
    assert (prepared.version, prepared.kind, prepared.row, prepared.dtype) == (2, "rows", SEQ + 1, "uint32")
    for name, split in prepared.splits.items():
        samples = TokenSamples(prepared.path, name, SEQ)
        rows = np.stack([samples[at] for at in range(len(samples))])
        assert rows.dtype == np.int32
        assert split.counted == counted_targets(rows, packed=True).sum() > 0
        padding = sum(len(ids) for row in rows for ids, marks in documents(row) if not any(marks))
        assert split.padding == padding
        assert split.fill == 1 - padding / rows.size
    counts = np.bincount(token_ids(rows[:, 1:])[counted_targets(rows, packed=True)])
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
    from axonn_jax.files.data.goldfish import GoldfishConfig, goldfish

    options = {"seq_len": SEQ, "global_batch": 4, "prefetch": 0}
    plain, dropped = (Loader(prepared.path, **options, dropped=GoldfishConfig(k, h)) for k, h in ((0, 13), (2, 3)))
    batch, marked_batch = next(plain), next(dropped)
    np.testing.assert_array_equal(marked_batch, goldfish(batch, 2, 3, packed=True))
    np.testing.assert_array_equal(token_ids(marked_batch), token_ids(batch))
    assert counted_targets(marked_batch, packed=True).sum() < 0.8 * counted_targets(batch, packed=True).sum()


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


def test_fill_of_skewed_lengths_is_at_least_97_percent():
    # Most are short, some hundreds of times longer.
    lengths = np.random.default_rng(1).lognormal(5.0, 0.9, 20_000).astype(int).clip(20, 2049)
    packer = Packer(2049)
    rows = []
    for number, length in enumerate(lengths):
        rows += packer.add(MarkedTokens(np.full(length, number, np.uint32), np.ones(length, bool), 0))
    rows += packer.flush()
    used = [sum(len(document.ids) for document in row) for row in rows]
    assert sorted(document.ids[0] for row in rows for document in row) == list(range(len(lengths)))
    assert max(used) <= 2049
    assert sum(used) / (2049 * len(rows)) >= 0.97
    assert len(lengths) > 10 * WINDOW


def test_all_targets_cut_and_mixed(folder, tmp_path, capsys):
    """A file of weight 2.5 comes 2 or 3 times, what is held out once, and what is too long is cut."""
    source = instruction_data.write(tmp_path / "a.jsonl", instruction_data.rows(30, seed=1))
    more = instruction_data.rows(40, seed=2)
    instruction_data.write(tmp_path / "b.jsonl", more)
    argv = ["prepare", "--instructions", source, tmp_path / "out", "--tokenizer", folder, "--seq-len", SEQ]
    argv += ["--mix", f"{tmp_path / 'b.jsonl'}:2.5", "--loss", "all", "--too-long", "cut", "--holdout", 0.3, "--bos"]
    argv += ["--template", "alpaca"]
    assert main([*map(str, argv), "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "keys not read: lang (24 rows)" in err
    assert result["splits"]["train"]["fill"] > 0.7
    manifest = Manifest.load(tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    times = Counter(ids for ids, _ in all_documents(manifest, SEQ))
    for row in instruction_data.rows(30, seed=1):
        assert times[(0, *alpaca(row, tokenizer)[0])[: SEQ + 1]] == 1
    seen = [times[(0, *alpaca(row, tokenizer)[0])[: SEQ + 1]] for row in more]
    assert {*seen} == {1, 2, 3}
    assert seen.count(3) + seen.count(2) == pytest.approx(0.7 * len(more), abs=8)
    assert manifest.skipped["cut"] > 0
    assert all(all(marks) for _, marks in all_documents(manifest, SEQ))


def test_a_vocabulary_of_150_000(tmp_path):
    folder = instruction_data.tokenizer(tmp_path / "t")

    def larger(raw):
        raw["added_tokens"].append({**raw["added_tokens"][-1], "id": 149_999, "content": "<|last|>"})
        raw["model"]["vocab"]["<|last|>"] = 149_999

    edit_json(folder / "tokenizer.json", larger)
    rows = [{"prompt": f"the {n}", "completion": "grid<|last|>mesh"} for n in range(8)]
    manifest, _ = instruction_data.prepared(tmp_path, rows, folder, 64, template="chat", bos=True)
    assert manifest.vocab == 150_000
    batch = next(Loader(tmp_path / "out", seq_len=64, global_batch=2, prefetch=0))
    assert 149_999 in token_ids(batch[:, 1:])[counted_targets(batch, packed=True)]
