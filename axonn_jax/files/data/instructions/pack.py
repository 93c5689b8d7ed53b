"""Packing of documents into rows of one length: first-fit decreasing within windows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 1024
"""Documents that are packed at a time."""


class MarkedTokens(NamedTuple):
    """Tokens of a document, and the targets among them."""

    ids: NDArray[np.uint32]
    counts: NDArray[np.bool_]
    """True for each token that counts as a target."""
    size: int
    """Bytes of the document's text."""

    @property
    def targets(self) -> int:
        """Number of targets; the first token is none."""
        return int(self.counts[1:].sum())

    def cut(self, length: int) -> "MarkedTokens":
        """Return the first `length` tokens; the size stays."""
        return MarkedTokens(self.ids[:length], self.counts[:length], self.size)


class Packer:
    """Packer of documents, of at most `width` tokens each, into rows of `width`."""

    def __init__(self, width: int):
        self._width = width
        self._waiting: list[MarkedTokens] = []

    def add(self, document: MarkedTokens) -> list[list[MarkedTokens]]:
        """Take a document; return the rows of a window when it is full."""
        self._waiting.append(document)
        if len(self._waiting) < WINDOW:
            return []
        rows = first_fit([len(document.ids) for document in self._waiting], self._width)
        # The row opened last has the most room, so carry its documents over to the next window.
        carried = rows.pop() if len(rows) > 1 else []
        full = [[self._waiting[at] for at in row] for row in rows]
        self._waiting = [self._waiting[at] for at in carried]
        return full

    def flush(self) -> list[list[MarkedTokens]]:
        """Return the rows of the documents that still wait."""
        rows = first_fit([len(document.ids) for document in self._waiting], self._width)
        waiting, self._waiting = self._waiting, []
        return [[waiting[at] for at in row] for row in rows]


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Return the indices of the documents in each row, by first-fit decreasing."""
    rooms = np.full(len(lengths), width)
    rows: list[list[int]] = []
    # A stable sort keeps documents of equal length in order, which makes the packing reproducible.
    for at in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        # The slice includes one empty row, so argmax always finds a row with room.
        row = int(np.argmax(rooms[: len(rows) + 1] >= lengths[at]))
        if row == len(rows):
            rows.append([])
        rows[row].append(at)
        rooms[row] -= lengths[at]
    return rows
