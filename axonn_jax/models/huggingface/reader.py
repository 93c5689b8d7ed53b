"""Reader of a pretrained directory: config and every tensor checked at once, then parts of parameters as needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.models.huggingface.entries import HEAD, TABLE, check_tensors, file_names, not_tied
from axonn_jax.models.huggingface.families import shape_from_config
from axonn_jax.models.huggingface.files import FileSpan, TensorFiles
from axonn_jax.models.huggingface.pretrained import read_config
from axonn_jax.models.huggingface.tensor_map import Bounds, TensorMap


class Pretrained:
    """Weights of a pretrained directory, checked to have every tensor in its size.

    Config and headers are read at once, tensors part by part. `field` names the directory in errors. Raises
    ``UserError`` for an unsupported config, and for files that are damaged or do not fit it.
    """

    def __init__(self, directory: Path, field: str):
        self.directory, self._field = directory, field
        self.config = read_config(directory, field)
        self.shape = shape_from_config(self.config)
        self.files = TensorFiles(directory, field)
        self._names = file_names(self.files.tensors, self.shape)
        sizes = {name: self.files.tensors[stored_name].shape for name, stored_name in self._names.items()}
        self.entries = {entry.ours: entry for entry in check_tensors(sizes, self.shape, field)}

    @property
    def tensors(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Full name, dtype and shape of each tensor in the order in which a token meets them; a tied one once."""
        names = [name for entry in self.entries.values() for name in entry.theirs]
        return [(name, *self.files.tensors[self._names[name]][1:]) for name in names]

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of this package's parameters."""
        return {ours: entry.size for ours, entry in self.entries.items()}

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """The tensor of a full name in pieces; raises ``UserError`` where a tied head is not the table."""
        table = next(iter(self.entries[TABLE].theirs))
        if name == table and self.shape.tied and HEAD in self._names:
            copies = (self.files.pieces(self._names[name]), self.files.pieces(self._names[HEAD]))
            for piece, head in zip(*copies, strict=True):
                if not np.array_equal(piece, head):
                    raise not_tied(self._field)
                yield piece
            return
        yield from self.files.pieces(self._names[name])

    def span(self, name: str) -> FileSpan | None:
        """Place of a tensor in its file; None for a table that `pieces` compares with a head."""
        if name in self.entries[TABLE].theirs and self.shape.tied and HEAD in self._names:
            return None
        return self.files.span(self._names[name])

    def read(self, ours: str, bounds: Bounds, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A part of one of our parameters, for which nothing else is read; zero beyond its size."""
        entry = self.entries[ours]
        value = entry.read(bounds, self._part, dtype)
        if ours == TABLE and self.shape.tied and HEAD in self._names:
            twin = TensorMap(TABLE, entry.size, {HEAD: entry.size}).read(bounds, self._part, dtype)
            if not np.array_equal(value, twin):
                raise not_tied(self._field)
        return value

    def _part(self, name: str, bounds: Bounds) -> NDArray[Any]:
        return self.files.read(self._names[name], bounds)
