"""Choice of the documents held out for evaluation."""

from collections.abc import Iterator
from dataclasses import replace

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.manifest import SPLITS
from axonn_jax.files.data.read import Document
from axonn_jax.files.data.source import Source


class Holdout:
    """Choice of the documents to hold out, by a hash of seed and text.

    A document's split does not depend on other documents, files or order, and copies of a text are in the same split.
    Both splits get at least one document, the one with the nearest hash. If a document has at least half of all text,
    or four times the share, only its last part is held out. With a share of 0 nothing is held out.
    """

    def __init__(self, share: float, seed: int):
        self._share, self._seed = share, f"{seed}\0".encode()
        self._least, self._most = 1 << 64, -1
        self._characters = self._longest = 0

    def see(self, document: Document) -> None:
        """Take a document into account; all documents must be seen before the first one gets a split."""
        place = document.place(self._seed)
        self._least, self._most = min(self._least, place), max(self._most, place)
        self._characters += document.characters
        self._longest = max(self._longest, document.characters)

    def divided(self, source: Source) -> Iterator[tuple[str, Document]]:
        """Yield the documents with their splits.

        Raises:
            UserError: all documents are the same, or there is one character.
        """
        if not self._share:
            yield from (("train", document) for document in source.documents())
            return
        long, bound = min(4 * self._share, 0.5) * self._characters, int(self._share * 2**64)
        # The minimum of one document per split only applies to undivided documents; a divided one is in both splits.
        if self._longest < long:
            if self.alike:
                raise UserError("SOURCE", str(source.root), "documents that differ; all are the same")
            bound = self._bound
        if self._characters < 2:
            raise UserError("SOURCE", str(source.root), "at least two characters, one to hold out")
        for document in source.documents():
            if document.characters >= long:
                yield from zip(SPLITS, _divide(document, self._share), strict=True)
            else:
                yield ("valid" if document.place(self._seed) < bound else "train"), document

    @property
    def alike(self) -> bool:
        """True if all seen documents are equal, so none can be held out; with a share of 0, if there are none."""
        return self._least >= self._most if self._share else self._most < 0

    def split_of(self, document: Document) -> str:
        """Return the split of a document that must not be divided; requires documents that differ."""
        return "valid" if document.place(self._seed) < self._bound else "train"

    @property
    def _bound(self) -> int:
        """Smallest hash that is not held out, such that both splits get an undivided document."""
        return min(max(int(self._share * 2**64), self._least + 1), self._most) if self._share else 0


def _divide(document: Document, share: float) -> tuple[Document, Document]:
    """Divide a document in two: at the start of its last share, or after the next line end.

    Neither half is empty. Both keep the document's digest.
    """
    at = min(max(round(document.characters * (1 - share)), 1), document.characters - 1)

    # Both halves are streamed from the document's parts, so that a long document never has to fit in memory.
    def halves() -> Iterator[tuple[str, str]]:
        done, behind = 0, False
        for part in document.parts():
            if behind or done + len(part) <= at:
                yield ("", part) if behind else (part, "")
            else:
                end = part.find("\n", at - done) + 1
                end = end if end and done + end < document.characters else at - done
                yield part[:end], part[end:]
                behind = True
            done += len(part)

    def half(side: int) -> Document:
        return replace(document, parts=lambda: filter(None, (pair[side] for pair in halves())))

    return half(0), half(1)
