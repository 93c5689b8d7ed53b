"""Token ids of long documents: those of the tokenizer run on the whole text, for every kind of tokenizer."""

import io
import random
from itertools import chain

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from axonn_jax.files.data import encode, read
from axonn_jax.files.data.read import Document

PART, OVERLAP = 4000, 512
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
GPT4 = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def long_text(seed: int, characters: int) -> str:
    """Prose, code and what no line ends: runs of one character longer than an overlap, DNA, characters in pieces."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghij") for _ in range(draw.randint(2, 6))) for _ in range(200)]
    runs = [" ", "=", "\n", "\r\n", "\t", "e\u0301", "👩‍👩‍👧", "日本語"]
    text = ""
    while len(text) < characters:
        kind = draw.randrange(6)
        if kind == 0:
            text += draw.choice(runs) * draw.randint(1, 900)
        elif kind == 1:
            text += "".join(draw.choices(draw.choice(["ACGT", "0123456789", "中文字符漢"]), k=draw.randint(1, 2000)))
        else:
            text += " " * draw.choice([0, 4, 8]) + " ".join(draw.choices(words, k=50)) + "\n"
    return text


def byte_level(**changes):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer, trainers.BpeTrainer(vocab_size=700, initial_alphabet=ALPHABET, show_progress=False)


def llama():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer, trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *BYTES], show_progress=False)


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )


def gpt4():
    split = pre_tokenizers.Split(GPT4, "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level(pre_tokenizer=words, normalizer=normalizers.NFC())


KINDS = {
    "own": byte_level,
    "trimmed offsets": lambda: byte_level(post_processor=processors.ByteLevel(trim_offsets=True)),
    "llama": llama,
    "unigram": unigram,
    "gpt-4": gpt4,
}


@pytest.fixture
def short_parts(monkeypatch):
    monkeypatch.setattr(read, "_PART", PART)
    monkeypatch.setattr(encode, "_OVERLAP", OVERLAP)


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_long_document_are_those_of_the_whole(kind):
    tokenizer, trainer = KINDS[kind]()
    tokenizer.train_from_iterator(long_text(1, 20_000).splitlines(), trainer)
    for seed in range(2, 5):
        text = long_text(seed, 9 * PART)
        got = list(encode.encode(tokenizer, [("train", Document.of(text))], [7], 9))
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert np.concatenate([ids for _, _, ids in got]).tolist() == [7, *whole, 9]
        assert sum(size for _, size, _ in got) == len(text.encode())
        assert len(got) > 9  # in pieces, not at once


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("entries", [1, 3, 1024])
def test_documents_of_any_length_come_in_order(monkeypatch, entries):
    monkeypatch.setattr(encode, "_BATCH_ENTRIES", entries)
    tokenizer, trainer = byte_level()
    tokenizer.train_from_iterator(long_text(1, 20_000).splitlines(), trainer)
    texts = [long_text(seed, characters) for seed, characters in enumerate((5, 9000, 1, 40, 20_000, 3000, 7, 12_000))]
    splits = ["train", "valid", "train", "train", "train", "valid", "valid", "train"]
    documents = list(zip(splits, map(Document.of, texts), strict=True))
    for wanted in ("train", "valid"):
        got = [ids for split, _, ids in encode.encode(tokenizer, documents, [], 9) if split == wanted]
        whole = [
            [*tokenizer.encode(text, add_special_tokens=False).ids, 9]
            for split, text in zip(splits, texts, strict=True)
            if split == wanted
        ]
        assert np.concatenate(got).tolist() == [*chain.from_iterable(whole)]


def test_parts_join_to_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_PART", 7)
    for text in (
        "",
        "short",
        "ab\ncd\nefgh\nij\n",
        "é" * 30,
        "x" * 20 + "\n" + "🙂" * 9,
        "1234567",
        "\ufeffa\r\nb\rc\n",
    ):
        (tmp_path / "file").write_bytes(text.encode())
        for parts in (list(read.text_parts(tmp_path / "file")), list(read.parts_of(io.StringIO(text, newline="")))):
            assert "".join(parts) == text
            assert all(parts)
    (tmp_path / "file").write_bytes("é".encode()[:1])
    with pytest.raises(UnicodeDecodeError):
        list(read.text_parts(tmp_path / "file"))
