"""Tokens of documents with the answers' tokens marked, exact by each token's character offsets."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError
from axonn_jax.core.options import InstructionLoss
from axonn_jax.files.data.instructions.mix import Mix, MixedRow
from axonn_jax.files.data.instructions.pack import MarkedTokens
from axonn_jax.files.data.instructions.templates import Passage, Template, Unmarked

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_AT_ONCE = 512  # documents that the tokenizer encodes on all cores


def encoded(
    mix: Mix,
    rows: Iterator[tuple[str, MixedRow]],
    template: Template,
    loss: InstructionLoss,
    tokenizer: "Tokenizer",
    begin: Sequence[int],
    end: int,
    unmarked: dict[str, UserError],
) -> Iterator[tuple[str, MarkedTokens, MixedRow]]:
    """Yield rows of a mix with their splits and marked tokens.

    Conversations whose answers cannot be located are left out, and their lines are added to `unmarked`. The remaining
    arguments are those of `marked`.
    """
    answers = loss == "response"

    def expressed() -> Iterator[tuple[str, MixedRow, list[Passage] | MarkedTokens]]:
        """Yield rows with passages or tokens; the marks are what counts, or with the loss `all` what does not."""
        for split, row in rows:
            conversation = row.conversation
            numbers = conversation.trained if answers else conversation.untrained
            if (ready := conversation.ready) is not None:
                yield split, row, ready if answers else ready._replace(counts=np.zeros_like(ready.counts))
            elif (text := conversation.document) is not None:
                # The passage adds the end token, so a text that already ends with it must not get a second one.
                text = text.removesuffix(tokenizer.id_to_token(end) or "")
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
            # Marks are exclusions here, so invert them: tokens between messages count as well.
            if loss == "all":
                document.counts[:] = ~document.counts
            yield split, document, row


def marked(
    tokenizer: "Tokenizer", documents: Sequence[list[Passage] | MarkedTokens], begin: Sequence[int], end: int
) -> list[MarkedTokens]:
    """Return the tokens of documents; a token counts if any of its characters belongs to an answer.

    Args:
        tokenizer: Of the library `tokenizers`; adds no token of its own.
        documents: Passages or tokens of each document.
        begin: Token ids before a document of passages that does not begin with them.
        end: Token id after a passage that is `ended`.
    """
    # One call for the passages of all documents, so that the tokenizer can use all cores.
    texts = [passage.text for document in documents if isinstance(document, list) for passage in document]
    encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    return [
        _document([(passage, next(encodings)) for passage in document], begin, end)
        if isinstance(document, list)
        else document._replace(size=len(tokenizer.decode(document.ids.tolist(), skip_special_tokens=False).encode()))
        for document in documents
    ]


def _document(passages: Iterable[tuple[Passage, "Encoding"]], begin: Sequence[int], end: int) -> MarkedTokens:
    ids, counts, size = list[int](), list[NDArray[np.bool_]](), 0
    for passage, encoding in passages:
        ids += encoding.ids
        counts.append(_answers(encoding.offsets, passage.marked))
        size += len(passage.text.encode())
        if passage.ended:
            ids.append(end)
            counts.append(np.full(1, len(passage.marked) > 0))
    # A chat template may already write the begin token.
    if ids[: len(begin)] != [*begin]:
        ids = [*begin, *ids]
        counts = [np.zeros(len(begin), bool), *counts]
    return MarkedTokens(np.asarray(ids, np.uint32), np.concatenate(counts), size)


def _answers(offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return True for each token with a character of an answer."""
    first, behind = np.asarray(offsets, np.int64).reshape(-1, 2).T
    # Some tokenizers exclude spaces from a token's offsets: extend a token of only spaces back to the previous token.
    previous_end = np.maximum.accumulate(np.concatenate([[0], behind]))[:-1]
    first = np.where(first == behind, np.minimum(previous_end, first), first)
    answered = np.zeros(len(first), bool)
    for begin, end in answers:
        answered |= (first < end) & (behind > begin)
    return answered
