"""Tokens of documents with marks: the tokens of answers, exact by the characters that each token is of."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.data.instructions.pack import MarkedTokens
from axonn_jax.data.instructions.templates import Passage


def marked(tokenizer: Any, documents: Sequence[list[Passage]], begin: Sequence[int], end: int) -> list[MarkedTokens]:
    """Return the tokens of documents; a token counts if one of its characters is an answer's.

    Args:
        tokenizer: Of the library `tokenizers`; adds no token of its own.
        documents: The passages of each.
        begin: Token ids before a document that does not begin with them.
        end: The token id behind a passage that is `ended`.
    """
    texts = [passage.text for document in documents for passage in document]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    return [_document([(passage, next(encodings)) for passage in document], begin, end) for document in documents]


def _document(passages: Iterable[tuple[Passage, Any]], begin: Sequence[int], end: int) -> MarkedTokens:
    ids, counts, size = list[int](), list[NDArray[np.bool_]](), 0
    for passage, encoding in passages:
        ids += encoding.ids
        counts.append(_answers(encoding.offsets, passage.marked))
        size += len(passage.text.encode())
        if passage.ended:
            ids.append(end)
            counts.append(np.full(1, len(passage.marked) > 0))
    if ids[: len(begin)] != [*begin]:
        ids = [*begin, *ids]
        counts = [np.zeros(len(begin), bool), *counts]
    return MarkedTokens(np.asarray(ids, np.uint32), np.concatenate(counts), size)


def _answers(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """True for each token, by its characters, that has one of an answer."""
    first, behind = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # Some tokenizers leave spaces out of a token's characters: one of spaces alone reaches back to the token before.
    before = np.maximum.accumulate(np.concatenate([[0], behind]))[:-1]
    first = np.where(first == behind, np.minimum(before, first), first)
    answered = np.zeros(len(first), bool)
    for begin, end in answers:
        answered |= (first < end) & (behind > begin)
    return answered
