"""Texts of tokens, piece by piece: what is held back, where they end, and the blank that some begin with."""

import types

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from axonn_jax.text.inference.generator import Continuation, Request
from axonn_jax.text.inference.sampling import Sampling
from axonn_jax.text.inference.texts import write

END = 256
BYTES = {"<end>": END, **{f"<0x{byte:02X}>": byte for byte in range(256)}}
WORDS = {"<end>": END, "?": 0, "\u2581say": 1, "\u2581hello": 2, "\u2581you": 3, "s": 4}


def tokenizer(vocab, decoder):
    made = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoder
    return made


BY_BYTE = tokenizer(BYTES, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))


def parts(pieces, stop=(), prompt=(65,), made=BY_BYTE):
    """What is handed on of tokens that come in these pieces: text, tokens and whether it ended."""

    def stream(requests, sampling, *, logs, until):
        for at, ids in enumerate(pieces):
            piece = Continuation(0, list(ids), [float(-token) for token in ids], at == len(pieces) - 1)
            if not piece.ended and until(0, piece):
                piece = piece._replace(ended=True)
            yield piece
            if piece.ended:
                return

    generator = types.SimpleNamespace(stream=stream, programs=types.SimpleNamespace(stops=(END,)))
    found = list(write(generator, made, [Request(tuple(prompt), 99)], Sampling(), stop=stop, logs=True))
    assert [part.log_probabilities for part in found] == [[float(-token) for token in part.ids] for part in found]
    return [(part.text, len(part.ids), part.ended) for part in found]


def test_a_character_waits_for_its_bytes():
    raw = "a\u20acb".encode()
    assert parts([raw[:1], raw[1:3], raw[3:]]) == [("a", 1, False), ("", 2, False), ("\u20acb", 2, True)]
    assert parts([raw[:1], raw[:2]])[1] == ("a\N{REPLACEMENT CHARACTER}", 2, True)  # of bytes that are not UTF-8


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("cut", range(4))
def test_characters_of_a_token_a_byte_are_not_lost(size, cut):
    """Where the prompt's part that is decoded with the text begins within a character, and where the text ends so."""
    text, prompt = "で\U0001f642す。東京\u00e9x", "日本語の文章です".encode()
    ids = text.encode() + "東".encode()[:cut] if cut < 3 else text.encode()
    found = parts([ids[at : at + size] for at in range(0, len(ids), size)], prompt=prompt[cut:])
    assert "".join(one[0] for one in found) == text + "\N{REPLACEMENT CHARACTER}" * (cut % 3)
    stopped = parts([ids[at : at + size] for at in range(0, len(ids), size)], stop=["東"], prompt=prompt)
    assert "".join(one[0] for one in stopped) == "で\U0001f642す。"


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("stop", ["<|im_end|>", "c<|im_end|>", "<|im_end|>\n", "."])
def test_a_stop_string_may_hold_a_special_token(size, stop):
    """Which is not shown otherwise."""
    vocab = {"<end>": END, "<|im_end|>": 257, "<|think|>": 258, **{chr(byte): byte for byte in range(256)}}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<|im_end|>", "<|think|>"])
    ids = [97, 258, *b"bc", 257, *b"\nd."]
    found = parts([ids[at : at + size] for at in range(0, len(ids), size)], stop=[stop], made=made)
    assert "".join(one[0] for one in found) == {"c": "ab", ".": "abc\nd"}.get(stop[0], "abc")
    assert sum(one[1] for one in found) == {"\n": 6, ".": 8}.get(stop[-1], 5)


def test_a_text_ends_before_a_stop_and_with_the_token_that_completes_it():
    assert parts([b"on", b"e, two, ", b"never"], stop=["wo,", ", t"]) == [("", 2, False), ("one", 4, True)]
    assert parts([b"abEN", b"D."], stop=["END"]) == [("ab", 4, False), ("", 1, True)]
    assert parts([b"abEN", b"T."], stop=["END"]) == [("ab", 4, False), ("ENT.", 2, True)]
    raw = "E\u20acD".encode()
    assert parts([raw[:2], raw[2:]], stop=["E\u20ac"]) == [("", 2, False), ("", 2, True)]


def test_the_token_that_ends_a_text_is_not_shown():
    assert parts([b"ab", [99, END]]) == [("ab", 2, False), ("c", 2, True)]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["metaspace", "as llama's"],
)
def test_a_blank_between_prompt_and_text_is_kept(decoder):
    made = tokenizer(WORDS, decoder)
    assert made.decode([2]) == "hello"
    assert parts([[2], [3, 4]], prompt=[1], made=made) == [(" hello", 1, False), (" yous", 2, True)]
    assert parts([[4, 2]], prompt=[1] * 99, made=made) == [("s hello", 2, True)]
