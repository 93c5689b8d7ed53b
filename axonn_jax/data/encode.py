"""Token ids of documents: those of each whole document, in bounded memory however long it is."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.data.read import Document

_BATCH = 4 << 20  # characters
_BATCH_ENTRIES = 1024
_WINDOWS = 4
_OVERLAP = 8192

Encoded = tuple[str, int, NDArray[np.uint32]]


def encode(
    tokenizer: Any, documents: Iterable[tuple[str, Document]], begin: Sequence[int], end: int
) -> Iterator[Encoded]:
    """Yield ``(split, bytes of text, token ids)``, the ids of a split in the order of its documents.

    Args:
        tokenizer: Of the library `tokenizers`; adds no token of its own.
        documents: Each with its split.
        begin: Token ids before each document.
        end: The token id behind each document.

    Raises:
        One of ``read.UNREADABLE``: a document can no longer be read.
    """
    batch, characters = list[tuple[str, str]](), 0
    for split, document in documents:
        parts = document.parts()
        first, second = next(parts, ""), next(parts, None)
        if second is None:
            batch.append((split, first))
            characters += len(first)
        if second is not None or characters >= _BATCH or len(batch) >= _BATCH_ENTRIES:
            yield from _short(tokenizer, batch, begin, end)
            batch, characters = [], 0
        if second is not None:
            yield split, 0, np.asarray(begin, np.uint32)
            for size, ids in _long(tokenizer, chain((first, second), parts)):
                yield split, size, ids
            yield split, 0, np.asarray([end], np.uint32)
    yield from _short(tokenizer, batch, begin, end)


def _short(tokenizer: Any, batch: list[tuple[str, str]], begin: Sequence[int], end: int) -> Iterator[Encoded]:
    """Yield the tokens of a batch of documents, once a split."""
    # The "fast" form leaves out character offsets, which nobody here needs.
    encoded = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
    for split in dict.fromkeys(split for split, _ in batch):
        chosen = [(text, tokens.ids) for (of, text), tokens in zip(batch, encoded, strict=True) if of == split]
        ids = np.fromiter(chain.from_iterable([*begin, *ids, end] for _, ids in chosen), np.uint32)
        yield split, sum(len(text.encode()) for text, _ in chosen), ids


@dataclass
class _EncodedText:
    """A stretch of a long document, and its tokens from ``first`` on: those before are of the window before."""

    text: str
    encoding: Any
    first: int = 0

    @cached_property
    def ids(self) -> NDArray[np.uint32]:
        return np.asarray(self.encoding.ids, np.uint32)

    def token_at(self, character: int) -> int:
        """Return the first token that begins at a character or behind it."""
        return bisect_left(range(len(self.ids)), character, key=lambda token: self.encoding.token_to_chars(token)[0])

    def spans(self, tokens: range, origin: int) -> list[tuple[int, int, int]]:
        """Return ids and characters of tokens, counted from ``origin``."""
        at = [self.encoding.token_to_chars(token) for token in tokens]
        return [(int(self.ids[token]), a - origin, b - origin) for token, (a, b) in zip(tokens, at, strict=True)]


def _long(tokenizer: Any, parts: Iterator[str]) -> Iterator[tuple[int, NDArray[np.uint32]]]:
    """Yield ``(bytes of text, token ids)`` of one long document.

    A piece of text encoded by itself differs from the same piece of a document at both ends: some tokenizers put a
    space before a text, and words and line ends are cut. So windows overlap, and are joined where the tokens of both
    agree in the middle of their overlap. Where they do not, the two windows are encoded as one.
    """
    held, tail, nothing = None, "", np.empty(0, np.uint32)
    while group := list(islice(parts, _WINDOWS)):
        texts = []
        for part in group:
            texts.append(tail + part)
            tail = texts[-1][-_OVERLAP:]
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        for part, text, encoding in zip(group, texts, encodings, strict=True):
            window, ids = _EncodedText(text, encoding), nothing
            if held is not None:
                if (last := _join(held, window, len(text) - len(part))) is not None:
                    ids = held.ids[held.first : last]
                else:
                    window = _both(tokenizer, held, part)
            yield len(part.encode()), ids
            held = window
    yield 0, nothing if held is None else held.ids[held.first :]


def _both(tokenizer: Any, left: _EncodedText, part: str) -> _EncodedText:
    """Return one window of ``left`` and the text behind it."""
    window = _EncodedText(left.text + part, tokenizer.encode(left.text + part, add_special_tokens=False))
    if left.first:
        window.first = window.token_at(left.encoding.token_to_chars(left.first)[0])
    return window


def _join(left: _EncodedText, right: _EncodedText, overlap: int) -> int | None:
    """Return the token of ``left`` at which ``right`` takes over from its then ``first``; None where they disagree."""
    origin = len(left.text) - overlap
    middle = overlap // 4, overlap - overlap // 4
    of_left = range(*(left.token_at(origin + at) for at in middle))
    of_right = range(*(right.token_at(at) for at in middle))
    skipped = max(left.first - of_left.start, 0)
    if skipped >= len(of_left) or left.spans(of_left, origin) != right.spans(of_right, 0):
        return None
    right.first = of_right.start + skipped
    return of_left.start + skipped
