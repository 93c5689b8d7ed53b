"""Mix of files of conversations, each with a weight."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.holdout import Holdout
from axonn_jax.files.data.instructions.schemas import Conversation, conversations
from axonn_jax.files.data.prompts import file_line
from axonn_jax.files.data.read import Document

_MOST_WEIGHT = 100


class MixedRow(NamedTuple):
    """Conversation of one line of a file."""

    field: str
    """Argument that named the file."""
    line: str
    weight: float
    conversation: Conversation
    document: Document


class Mix:
    """Files of conversations, each with a weight.

    Args:
        sources: Files with weight 1.
        mix: More files with weights, each as FILE:WEIGHT.
        seed: Seed that selects the rows of a fractional weight.
        takes: Function of a message's key that returns True if the template reads it.
        vocab_ids: Ids of the tokenizer.
        skip_bad: True if unusable rows are skipped and recorded in `bad`; else the first raises its ``UserError``.
        valid: File of held-out rows, in addition to those held out of the other files.
    """

    def __init__(
        self,
        sources: Sequence[Path],
        mix: Sequence[str],
        seed: int,
        takes: Callable[[str], bool],
        vocab_ids: Set[int],
        *,
        skip_bad: bool = False,
        valid: Path | None = None,
    ):
        self.files = [*((path, "SOURCE", 1.0) for path in sources), *map(_weighted, mix)]
        if valid and not valid.is_file():
            raise UserError("--valid", str(valid), "a file of conversations")
        self._valid = valid
        self.unused, self.bad = Counter[str](), dict[str, UserError]()
        self._takes, self._vocab_ids, self._skip_bad = takes, vocab_ids, skip_bad
        self._seed = f"{seed} mix\0".encode()

    def rows(self, turn: int = 0) -> Iterator[MixedRow]:
        """Yield the rows of the files whose weight is above `turn`."""
        for path, field, weight in self.files:
            if weight > turn:
                yield from self._rows_of(path, field, weight)

    def leave_out(self, line: str, error: UserError) -> None:
        """Record why a row is unusable, or raise the reason unless unusable rows are skipped."""
        if not self._skip_bad:
            raise error
        self.bad[line] = error

    def _rows_of(self, path: Path, field: str, weight: float = 1.0) -> Iterator[MixedRow]:
        for number, conversation in conversations(path, field, self.unused, self._takes, self._vocab_ids):
            if isinstance(conversation, UserError):
                self.leave_out(file_line(path, number), conversation)
            else:
                document = Document.of(conversation.text)
                yield MixedRow(field, file_line(path, number), weight, conversation, document)

    def divided(self, splitter: Holdout) -> Iterator[tuple[str, MixedRow]]:
        """Yield rows with their splits, each as often as its weight says; held-out rows at most once.

        Rows of the held-out file come last. The fractional part of a weight is a share of the rows, selected by a hash.
        """
        # Repeat whole passes over the files instead of single rows, so that copies of a row are far apart.
        for turn in range(math.ceil(max(weight for _, _, weight in self.files))):
            for row in self.rows(turn):
                split = splitter.split_of(row.document)
                # A separate seed keeps this choice independent of the split's, which hashes the same document.
                place = row.document.place(self._seed) / 2**64
                if turn < int(row.weight) + (place < row.weight % 1) and (turn == 0 or split == "train"):
                    yield split, row
        if self._valid:
            yield from (("valid", row) for row in self._rows_of(self._valid, "--valid"))


def _weighted(text: str) -> tuple[Path, str, float]:
    """Return the path, field and weight of FILE:WEIGHT."""
    path, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not 0 < weight <= _MOST_WEIGHT:
        accepted = f"FILE:WEIGHT with a weight above 0 and at most {_MOST_WEIGHT}, such as more.jsonl:0.5"
        raise UserError("--mix", text, accepted)
    return Path(path), "--mix", weight
