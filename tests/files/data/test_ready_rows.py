"""Ready rows, of token ids and labels: prepared as the conversations that transformers made them of."""

import instruction_data
import pytest
import transformers
from instruction_data import TALK, all_documents

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions

SEQ = 96


@pytest.fixture(scope="module")
def pairs(folder):
    """Conversations, and rows that transformers' tokenizer makes of them, padded on either side or not at all."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    talks = [[TALK[0] | {"content": f"the {n}"}, *TALK[1 : 2 + 2 * (n % 2)]] for n in range(24)]
    rows = []
    for n, talk in enumerate(talks):
        made = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks = made["input_ids"], made["assistant_masks"]
        labels = [token if mark else -100 for token, mark in zip(ids, marks, strict=True)]
        row = {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}
        pad = {"input_ids": [3], "labels": [-100], "attention_mask": [0]}
        before, behind = 2 * (n % 3 == 1), 5 * (n % 3 == 2)
        rows.append({key: pad[key] * before + row[key] + pad[key] * behind for key in row})
    return [{"messages": talk} for talk in talks], rows


def prepared(source, out, folder, **options):
    holdout = options.pop("holdout", 0.2)
    given = InstructionOptions(**{"seq_len": SEQ, "template": "chat"} | options)
    return prepare_instructions(source, out, given, tokenizer=folder, holdout=holdout, force=True)


def tabled(path, rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = arrow.list_(arrow.int32())
    names = ("input_ids", "labels", "attention_mask")
    columns = {name: arrow.array([row.get(name) for row in rows], lists) for name in names}
    columns["messages"] = arrow.array([row.get("messages") for row in rows])
    parquet.write_table(arrow.table(columns), path)
    return path


def test_tokens_and_targets_are_those_of_the_conversations(folder, pairs, tmp_path):
    """In JSON Lines and Parquet, alone and mixed with conversations in one file."""
    talks, rows = pairs
    mixed = [*talks[:9], *rows[9:]]
    sources = [instruction_data.write(tmp_path / f"{n}.jsonl", given) for n, given in enumerate((talks, rows, mixed))]
    every = [{key: row.get(key) for key in ("prompt", "messages", *rows[0])} for row in mixed]  # as a table's rows
    sources += [
        instruction_data.write(tmp_path / "5.jsonl", every),
        tabled(tmp_path / "3.parquet", rows),
        tabled(tmp_path / "4.parquet", mixed),
    ]
    for loss in ("response", "all"):
        found = []
        for source in sources:
            manifest, _ = prepared(source, tmp_path / "out", folder, loss=loss)
            assert not any(manifest.skipped.values())
            size = sum(split.bytes for split in manifest.splits.values())
            found.append((size, sorted(all_documents(manifest, SEQ))))
        assert len(found[0][1]) == len(talks)
        assert all(documents == found[0] for documents in found)


def test_a_row_keeps_its_tokens_as_they_are(folder, tmp_path):
    """No token is added, `--bos` or not; the tokenizer keeps its chat template; other columns are listed."""
    rows = [{"input_ids": [10 + n, 11, 12], "labels": None, "text": "x"} for n in range(8)]
    source = instruction_data.write(tmp_path / "rows.jsonl", rows)
    manifest, notes = prepared(source, tmp_path / "out", folder, template="alpaca", bos=True)
    assert sorted(all_documents(manifest, SEQ)) == [((10 + n, 11, 12), (True,) * 3) for n in range(8)]
    assert notes == ["keys not read: text (8 rows)", "no target is <|endoftext|>, at which generation ends"]
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    more = instruction_data.write(tmp_path / "more.jsonl", [{"prompt": f"{n}", "completion": "a"} for n in range(4)])
    prepared(source, tmp_path / "out", folder, template="alpaca", mix=[f"{more}:2"])
    assert (tmp_path / "out" / "chat_template.jinja").exists()


def test_rows_longer_than_a_row_and_rows_without_targets(folder, tmp_path):
    rows = [{"input_ids": [*range(10, 20 + n)]} for n in range(8)]
    rows += [{"input_ids": [7] * 10_000}, {"input_ids": [8, 8], "labels": [-100, -100]}, {"input_ids": [9]}]
    source = instruction_data.write(tmp_path / "rows.jsonl", rows)
    for too_long, left in (("drop", {"too_long": 1}), ("cut", {"cut": 1})):
        manifest, _ = prepared(source, tmp_path / "out", folder, too_long=too_long)
        assert {key: count for key, count in manifest.skipped.items() if count} == {"without_targets": 2} | left
        lengths = sorted(len(ids) for ids, _ in all_documents(manifest, SEQ))
        assert lengths == [*range(10, 18), *[SEQ + 1] * (too_long == "cut")]


def test_rows_without_a_target_are_one_line(folder, tmp_path):
    rows = [{"input_ids": [5, n], "labels": [-100, -100]} for n in range(8)] + [{"input_ids": [9]}]
    source = instruction_data.write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"^SOURCE = .*rows.jsonl': .* left out \(9 without a target that counts\)$"):
        prepared(source, tmp_path / "out", folder)


IDS = {"input_ids": [5, 6, 7]}
WRONG = {
    "text": ({"input_ids": "5 6"}, "a list of whole numbers in 'input_ids'; this is str"),
    "bools": ({"input_ids": [5, True]}, "whole numbers in 'input_ids'; this one has True"),
    "floats": (IDS | {"labels": [5.0, 6, 7]}, "whole numbers in 'labels'; this one has 5.0"),
    "nulls": ({"input_ids": [5, None]}, "whole numbers in 'input_ids'; this one has None"),
    "a batch": ({"input_ids": [[5, 6], [7]]}, "whole numbers in 'input_ids'; this one has [5, 6]"),
    "lengths": (IDS | {"labels": [5, 6]}, "3 labels, as input_ids; these are 2"),
    "length of the mask": (IDS | {"attention_mask": [1] * 4}, "3 attention_mask, as input_ids; these are 4"),
    "a hole": (IDS | {"attention_mask": [1, 0, 1]}, "zeros before and behind the text alone"),
    "a mask of numbers": (IDS | {"attention_mask": [1, 2, 1]}, "an attention_mask of ones"),
    "beyond": ({"input_ids": [5, 500]}, "input_ids of the tokenizer, whose largest is 403; 500 is none"),
    "far beyond": ({"input_ids": [5, 2**70]}, "whose largest is 403; 1180591620717411303424 is none"),
    "negative": ({"input_ids": [5, -1]}, "whose largest is 403; -1 is none"),
    "a large label": (IDS | {"labels": [5, 6, 2**70]}, "1180591620717411303424 is at 7"),
    "shifted": (
        IDS | {"labels": [6, 7, -100]},
        "labels that are -100 or the token at their place; 6 is at 5",
    ),
    "empty": ({"input_ids": []}, "at least one token in 'input_ids'"),
    "padding": (IDS | {"attention_mask": [0] * 3}, "at least one token in 'input_ids'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_row_of_no_use_is_one_line(folder, tmp_path, kind):
    row, says = WRONG[kind]
    rows = [{"input_ids": [10 + n, 11]} for n in range(8)]
    source = instruction_data.write(tmp_path / "rows.jsonl", [*rows, row])
    with pytest.raises(UserError) as raised:
        prepared(source, tmp_path / "out", folder)
    assert str(raised.value).startswith(f"SOURCE = '{source}, line 9': ")
    assert says in str(raised.value)
    manifest, notes = prepared(source, tmp_path / "out", folder, skip_bad=True)
    assert manifest.skipped["bad"] == 1
    assert any(says in note for note in notes)
