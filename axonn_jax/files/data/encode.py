"""Token ids of documents, one document at a time, in bounded memory."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from axonn_jax.files.data.read import Document

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_BATCH = 4 << 20  # characters
_BATCH_ENTRIES = 1024
_GROUP = 4
_OVERLAP = 8192

Encoded = tuple[str, int, NDArray[np.uint32]]


def encode(
    tokenizer: "Tokenizer", documents: Iterable[tuple[str, Document]], begin: Sequence[int], end: int
) -> Iterator[Encoded]:
    """Yield ``(split, bytes of text, token ids)``, the ids of a split in the order of its documents.

    Args:
        tokenizer: Of the library `tokenizers`; adds no token of its own.
        documents: Pairs of split and document.
        begin: Token ids before each document.
        end: Token id after each document.

    Raises:
        One of ``read.UNREADABLE``: a document can no longer be read.
    """
    batch, characters = list[tuple[str, str]](), 0
    for split, document in documents:
        parts = document.parts()
        # Short documents are batched; one of several parts would make a batch too large and is encoded on its own.
        first, second = next(parts, ""), next(parts, None)
        if second is None:
            batch.append((split, first))
            characters += len(first)
        if second is not None or characters >= _BATCH or len(batch) >= _BATCH_ENTRIES:
            # Flush before a long document, so that the ids of a split stay in the order of its documents.
            yield from _short(tokenizer, batch, begin, end)
            batch, characters = [], 0
        if second is not None:
            yield split, 0, np.asarray(begin, np.uint32)
            for size, ids in _long(tokenizer, chain((first, second), parts)):
                yield split, size, ids
            yield split, 0, np.asarray([end], np.uint32)
    yield from _short(tokenizer, batch, begin, end)


def _short(tokenizer: "Tokenizer", batch: list[tuple[str, str]], begin: Sequence[int], end: int) -> Iterator[Encoded]:
    """Yield the tokens of a batch of documents, once per split."""
    # The "fast" variant skips character offsets, which are not needed here.
    encoded = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
    for split in dict.fromkeys(split for split, _ in batch):
        members = [(text, tokens.ids) for (of, text), tokens in zip(batch, encoded, strict=True) if of == split]
        ids = np.fromiter(chain.from_iterable([*begin, *ids, end] for _, ids in members), np.uint32)
        yield split, sum(len(text.encode()) for text, _ in members), ids


@dataclass
class _Piece:
    """A piece of a long document, encoded with some of the surrounding text."""

    prefix: str
    text: str
    suffix: str
    ids: NDArray[np.uint32]
    """Tokens of all three."""
    seam: "Encoding"
    """Encoding of the end of ``text`` with ``suffix``, including each token's character offsets."""
    first: int = 0
    """Index of the piece's first token; earlier tokens belong to the previous piece."""


def _long(tokenizer: "Tokenizer", parts: Iterator[str]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield ``(bytes of text, token ids)`` of one long document.

    A piece encoded on its own differs at both ends: some tokenizers put a space before a text, and words and line ends
    are cut. Each piece is therefore encoded with text of its neighbours, and two pieces are joined if their tokens
    agree on both sides of the seam. Pieces that do not agree are encoded as one.
    """
    pending, context, pieces = None, "", _pieces(parts)
    following = next(pieces, None)
    while following is not None:
        texts = [following, *islice(pieces, _GROUP)]
        following = texts.pop() if len(texts) > _GROUP else None
        ends = [text[:_OVERLAP] for text in [*texts[1:], following or ""]]
        begins = [text[-_OVERLAP:] for text in [context, *texts[:-1]]]
        for piece in _encoded(tokenizer, begins, texts, ends):
            size, ids = len(piece.text.encode()), np.empty(0, np.uint32)
            if pending is not None:
                last = _join(pending, piece)
                if last is None:
                    (piece,) = _encoded(tokenizer, [pending.prefix], [pending.text + piece.text], [piece.suffix])
                    piece.first = pending.first
                else:
                    ids = pending.ids[pending.first : last]
            yield size, ids
            pending = piece
        context = texts[-1]
    if pending is not None:
        yield 0, pending.ids[pending.first :]


def _pieces(parts: Iterator[str]) -> Iterator[str]:
    """Yield the parts, merging parts shorter than an overlap with their neighbours."""
    buffer = ""
    for part in parts:
        if min(len(buffer), len(part)) >= _OVERLAP:
            yield buffer
            buffer = ""
        buffer += part
    yield buffer


def _encoded(tokenizer: "Tokenizer", begins: list[str], texts: list[str], ends: list[str]) -> Iterator[_Piece]:
    around = list(zip(begins, texts, ends, strict=True))
    # Character offsets take as long as the tokens, so only the short seams are encoded with them.
    encodings = tokenizer.encode_batch_fast(list(map("".join, around)), add_special_tokens=False)
    seams = tokenizer.encode_batch([text[-_OVERLAP:] + end for _, text, end in around], add_special_tokens=False)
    for (prefix, text, suffix), encoding, seam in zip(around, encodings, seams, strict=True):
        yield _Piece(prefix, text, suffix, np.asarray(encoding.ids, np.uint32), seam)


def _join(previous: _Piece, following: _Piece) -> int | None:
    """Return the token of ``previous`` at which ``following`` takes over, or None if their tokens do not agree.

    ``previous`` is compared from half an overlap before the seam, and ``following`` up to half an overlap after it, so
    that both comparisons stay away from the cut ends. Sets ``following.first``.
    """
    ids, spans = np.asarray(previous.seam.ids, np.uint32), previous.seam.offsets
    low, cut, high = (
        bisect_left(spans, at, key=lambda span: span[0]) for at in (_OVERLAP // 2, _OVERLAP, _OVERLAP + _OVERLAP // 2)
    )
    last = len(previous.ids) - (len(ids) - cut)
    agree = np.array_equal(previous.ids[len(previous.ids) - (len(ids) - low) :], ids[low:])
    if not (low < cut < high and agree and np.array_equal(following.ids[:high], ids[:high]) and last >= previous.first):
        return None
    following.first = cut
    return last
