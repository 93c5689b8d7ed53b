"""Tokens of documents with marks: the tokens of answers, exact by the characters that each token is of."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.data.instructions.mix import Mix, MixedRow
from axonn_jax.data.instructions.pack import MarkedTokens
from axonn_jax.data.instructions.templates import Passage, Template, Unmarked
from axonn_jax.errors import UserError
from axonn_jax.options import InstructionLoss

_AT_ONCE = 512  # documents that the tokenizer encodes on all cores


def encoded(
    mix: Mix,
    rows: Iterator[tuple[str, MixedRow]],
    template: Template,
    loss: InstructionLoss,
    tokenizer: Any,
    begin: Sequence[int],
    end: int,
    unmarked: dict[str, UserError],
) -> Iterator[tuple[str, MarkedTokens, MixedRow]]:
    """Yield rows of a mix with their splits and tokens, which are marked where they count.

    `unmarked` gets the lines of conversations in which answers cannot be told apart, which are left out. `marked` has
    the other arguments.
    """
    answers = loss == "response"

    def expressed() -> Iterator[tuple[str, MixedRow, list[Passage] | MarkedTokens]]:
        """Yield rows with passages, or tokens: marked is what counts, or with `all` what does not."""
        for split, row in rows:
            conversation = row.conversation
            numbers = conversation.trained if answers else conversation.untrained
            if (ready := conversation.ready) is not None:
                yield split, row, ready if answers else ready._replace(counts=np.zeros_like(ready.counts))
            elif (text := conversation.document) is not None:  # which the end token ends once
                text = text.removesuffix(tokenizer.id_to_token(end))
                yield split, row, [Passage(text, [(0, len(text))] if answers else [], True)]
            else:
                try:
                    if not answers and not {*numbers} <= {*conversation.answers}:
                        raise UserError("row", row.line, "with --loss all marks of 0 on the assistant's messages alone")
                    yield split, row, template.passages(conversation, numbers)
                except Unmarked as error:
                    unmarked[row.line] = error
                except UserError as error:
                    mix.leave_out(row.line, UserError(row.field, row.line, error.accepted))

    expressible = expressed()
    while batch := list(islice(expressible, _AT_ONCE)):
        documents = marked(tokenizer, [passages for _, _, passages in batch], begin, end)
        for (split, row, _), document in zip(batch, documents, strict=True):
            if loss == "all":
                document.counts[:] = ~document.counts
            yield split, document, row


def marked(
    tokenizer: Any, documents: Sequence[list[Passage] | MarkedTokens], begin: Sequence[int], end: int
) -> list[MarkedTokens]:
    """Return the tokens of documents; a token counts if one of its characters is an answer's.

    Args:
        tokenizer: Of the library `tokenizers`; adds no token of its own.
        documents: The passages of each, or its tokens.
        begin: Token ids before a document of passages that does not begin with them.
        end: The token id behind a passage that is `ended`.
    """
    texts = [passage.text for document in documents if isinstance(document, list) for passage in document]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    return [
        _document([(passage, next(encodings)) for passage in document], begin, end)
        if isinstance(document, list)
        else document._replace(size=len(tokenizer.decode(document.ids.tolist(), skip_special_tokens=False).encode()))
        for document in documents
    ]


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
    previous_end = np.maximum.accumulate(np.concatenate([[0], behind]))[:-1]
    first = np.where(first == behind, np.minimum(previous_end, first), first)
    answered = np.zeros(len(first), bool)
    for begin, end in answers:
        answered |= (first < end) & (behind > begin)
    return answered
