"""Sources that people have: JSON Lines, Parquet, gz and zst, one file, a glob, the Hugging Face cache."""

import gzip
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import refusal
from tokenizers import Tokenizer, processors

from axonn_jax.cli.main import main
from axonn_jax.core.errors import UserError
from axonn_jax.files.data.holdout import Holdout
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare
from axonn_jax.files.data.read import Document
from axonn_jax.files.data.source import scan

TEXTS = [f"Document {n} begins.\n" + f"\tIts line, été {n * n}.\r\n" * (n % 5 + 1) for n in range(60)]


def json_lines(texts):
    rows = ({"id": n, "text": text, "meta": {"url": f"http://x/{n}"}} for n, text in enumerate(texts))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zstd(raw):
    return pa.compress(raw, codec="zstd", asbytes=True)


def write_plain(folder, texts):
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())


def write_zst(folder, texts):
    """Two frames in a file, as parallel compressors write them."""
    (folder / "a.jsonl.zst").write_bytes(zstd(json_lines(texts[:20])) + zstd(json_lines(texts[20:])))


def write_mixed(folder, texts):
    """A folder in which each kind holds a part of the texts, in the order of names."""
    (folder / "a.jsonl").write_bytes(json_lines(texts[:10]) + b"\n  \n")
    pq.write_table(pa.table({"n": range(15), "text": texts[10:25]}), folder / "b.parquet", row_group_size=4)
    (folder / "c.ndjson.gz").write_bytes(gzip.compress(json_lines(texts[25:40])))
    (folder / "d").mkdir()
    (folder / "d" / "e.jsonl.zst").write_bytes(zstd(json_lines(texts[40:58])))
    (folder / "d" / "f.txt.gz").write_bytes(gzip.compress(texts[58].encode()))
    (folder / "d" / "g.md.zst").write_bytes(zstd(texts[59].encode()))


WRITERS = {
    "jsonl": lambda folder, texts: (folder / "a.jsonl").write_bytes(json_lines(texts)),
    "two in gz": lambda folder, texts: [
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(json_lines(texts[part])))
        for name, part in (("a", slice(0, 33)), ("b", slice(33, None)))
    ],
    "parquet": lambda folder, texts: pq.write_table(pa.table({"text": texts}), folder / "a.parquet"),
    "zst": write_zst,
    "mixed": write_mixed,
}


def tokens(folder):
    manifest = Manifest.load(folder)
    return {
        name: np.concatenate([np.fromfile(folder / shard.name, manifest.storage) for shard in split.shards]).tolist()
        for name, split in manifest.splits.items()
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "text").mkdir()
    write_plain(folder / "text", TEXTS)
    prepare(folder / "text", folder / "data", vocab=300, holdout=0.1)
    return folder / "data"


@pytest.mark.parametrize("kind", WRITERS)
def test_documents_give_the_same_tokens_from_every_kind_of_file(plain, tmp_path, kind, capsys):
    (tmp_path / "text").mkdir()
    WRITERS[kind](tmp_path / "text", TEXTS)
    command = ["prepare", str(tmp_path / "text"), str(tmp_path / "data"), "--vocab", "300", "--holdout", "0.1"]
    assert main(command) == 0
    assert tokens(tmp_path / "data") == tokens(plain)
    assert (tmp_path / "data" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert "skipped" not in capsys.readouterr().err
    assert sum(split.documents for split in Manifest.load(tmp_path / "data").splits.values()) == 60


def test_one_file_and_a_glob_are_sources(plain, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS[:30]))
    (tmp_path / "b.jsonl").write_bytes(json_lines(TEXTS[30:]))
    (tmp_path / "c.corpus").write_bytes(json_lines(TEXTS))
    prepare(tmp_path / "?.jsonl", tmp_path / "glob", vocab=300, holdout=0.1)
    assert tokens(tmp_path / "glob") == tokens(plain)
    _, source = prepare(tmp_path / "c.corpus", tmp_path / "one", vocab=300, holdout=0.1)
    assert list(source.files) == ["c.corpus"]  # whatever its name says
    text = (tmp_path / "c.corpus").read_bytes().decode()
    tokenizer = Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    head, tail = (tokenizer.decode(ids[:-1]) for ids in tokens(tmp_path / "one").values())
    assert head + tail == text
    assert tail.startswith('{"id": ')  # from a line on
    assert 0.08 * len(text) < len(tail) < 0.1 * len(text)
    with pytest.raises(UserError, match=r"SOURCE = .*nothing\*'.*matches files"):
        prepare(tmp_path / "nothing*", tmp_path / "out", vocab=300)


def test_links_of_the_hugging_face_cache_are_read_once(plain, tmp_path):
    repository = tmp_path / "datasets--us--texts"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "0123").write_bytes(json_lines(TEXTS[:30]))
    (repository / "blobs" / "4567").write_bytes(gzip.compress(json_lines(TEXTS[30:])))
    (tmp_path / "elsewhere.jsonl").write_bytes(json_lines(["a secret"]))
    for revision in ("aaa", "bbb"):
        data = repository / "snapshots" / revision / "data"
        data.mkdir(parents=True)
        (data / "0.jsonl").symlink_to("../../../blobs/0123")
        (data / "1.jsonl.gz").symlink_to("../../../blobs/4567")
        (data / "2.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    for number, folder in enumerate((repository, repository / "snapshots" / "bbb", data)):
        _, source = prepare(folder, tmp_path / str(number), vocab=300, holdout=0.1)
        assert tokens(tmp_path / str(number)) == tokens(plain)
        assert source.skipped == {"symlink": 4 if folder == repository else 1}


def test_what_is_left_out_is_counted_by_kind(tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    good = json_lines(TEXTS[:8])
    lines = [b'{"text": "cut off', b"[1, 2]", b'{"words": "x"}', b'{"text": null}', b'{"text": ""}', b"7", b"[" * 99999]
    lines += [b'{"text": "\\ud800"}', b'{"text": "caf\xe9"}']
    (folder / "a.jsonl").write_bytes(good + b"\n".join(lines) + b"\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(TEXTS[8:40]))[:-9])
    (folder / "c.txt.zst").write_bytes(zstd(TEXTS[40].encode())[:-4])
    (folder / "d.parquet").write_bytes(b"PAR1 no table PAR1")
    pq.write_table(pa.table({"words": ["x", "y"]}), folder / "e.parquet")
    (folder / "f.csv").write_text("a,b\n")
    command = ["prepare", str(folder), str(tmp_path / "data"), "--vocab", "270", "--json", "--holdout", "0.2"]
    assert main(command) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["skipped"] == {
        "empty": 1,
        "no_field": 4,
        "no_text": 1,
        "not_included": 1,
        "not_json": 3,
        "not_utf8": 1,
        "unreadable": 3,
    }
    assert "skipped 3 not_json, such as 'a.jsonl:9'" in captured.err
    assert "skipped 3 unreadable, such as 'b.jsonl.gz:33'" in captured.err
    assert "left out by --include: 1 .csv" in captured.err
    assert sum(split["documents"] for split in result["splits"].values()) == 8 + 32


def test_copies_of_a_text_are_in_one_split_whatever_else_is_there(tmp_path):
    def splits(texts, seed=0):
        held, folder = Holdout(0.3, seed), tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(json_lines(texts))
        source = scan(folder, tmp_path / "out", include=(), exclude=(), text_field="text", see=held.see, report=ignore)
        return ["".join(document.parts()) for split, document in held.divided(source) if split == "valid"]

    def ignore(*_):
        pass

    before = splits(TEXTS)
    assert 6 < len(before) < 30
    assert splits(TEXTS) == before
    assert any(splits(TEXTS, seed) != before for seed in range(1, 4))
    assert sorted(splits([*TEXTS, "another", *TEXTS[::-1]])) == sorted([*before, *before])
    assert {*splits(TEXTS[:30])} <= {*before}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-9, 0.05, 0.5, 1 - 1e-9])
def test_both_splits_have_text_and_a_long_document_does_not_fill_one(seed, share):
    for texts in (TEXTS[:2], TEXTS[:12], [*TEXTS[:5], "\n".join(TEXTS)], ["ab"], ["a b\n" * 1000]):
        held = Holdout(share, seed)
        documents = [Document.of(text) for text in texts]
        for document in documents:
            held.see(document)
        divided = list(held.divided(type("Source", (), {"documents": lambda _, all=documents: all})()))
        text = {name: ["".join(d.parts()) for split, d in divided if split == name] for name in ("train", "valid")}
        assert all(map(all, text.values()))
        assert all(text.values())
        assert sorted("".join(text["train"] + text["valid"])) == sorted("".join(texts))
        if share == 0.05 and len(texts[-1]) > 900:
            assert len("".join(text["valid"])) < 0.2 * len("".join(texts))


def test_bos_is_that_of_the_post_processor(plain, tmp_path, capsys):
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    pair = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=pair)
    shutil.copytree(plain, tmp_path / "given")
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    given = ["--tokenizer", str(tmp_path / "given"), "--holdout", "0.1"]
    for flags in ([], ["--bos"]):
        assert main(["prepare", str(tmp_path / "a.jsonl"), str(tmp_path / f"data{len(flags)}"), *given, *flags]) == 0
    assert "documents begin without <s>" in capsys.readouterr().err.replace("\n", " ")
    without, with_bos = tokens(tmp_path / "data0")["train"], tokens(tmp_path / "data1")["train"]
    begins = np.flatnonzero(np.array([0, *with_bos[:-1]]) == 0)
    assert {with_bos[at] for at in begins} == {pair[0][1]}
    assert [token for token in with_bos if token != pair[0][1]] == without
    for arguments in (["--vocab", "300"], ["--tokenizer", str(plain)]):
        assert "--bos = True" in refusal(capsys, "prepare", tmp_path / "a.jsonl", tmp_path / "x", *arguments, "--bos")


def refused(tmp_path, capsys, *arguments):
    line = refusal(capsys, "prepare", *arguments, tmp_path / "out", "--vocab", "300")
    assert not (tmp_path / "out").exists()
    return line


def test_a_source_without_text_is_one_line(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.csv").write_text("a,b\n")
    assert "there: 1 .csv" in refused(tmp_path, capsys, folder)
    (folder / "a.jsonl").write_bytes(json_lines(TEXTS).replace(b'"text"', b'"content"'))
    line = refused(tmp_path, capsys, folder)
    assert line.startswith("error: --field = 'text': ")
    assert "60 no_field, such as 'a.jsonl:1'" in line
    assert main(["prepare", str(folder), str(tmp_path / "data"), "--vocab", "300", "--field", "content"]) == 0
    capsys.readouterr()
    (folder / "a.jsonl").write_bytes(json_lines(["one"] * 9))
    assert "documents that differ" in refused(tmp_path, capsys, folder)
    (folder / "b.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = refused(tmp_path, capsys, folder)
    assert "pip install 'axonn_jax[data]'" in line
    assert str(Path("text") / "b.parquet") in line
