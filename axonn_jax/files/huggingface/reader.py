"""Reader of a pretrained directory: validates config and headers, then reads slices of parameters on demand."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from axonn_jax.files.huggingface.entries import HEAD, TABLE, check_tensors, file_names, not_tied
from axonn_jax.files.huggingface.families import shape_from_config
from axonn_jax.files.huggingface.files import FileSpan, TensorFiles
from axonn_jax.files.huggingface.pretrained import read_config
from axonn_jax.files.huggingface.tensor_map import Bounds, TensorMap


class Pretrained:
    """Weights of a pretrained directory; the constructor checks the config and every tensor's size.

    Args:
        directory: Directory with config.json and safetensors.
        field: Name of the directory in errors.

    Raises:
        UserError: The config is not supported, or files are damaged or do not fit it.
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
    def tensors(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...]]]:
        """Full name, dtype and shape of each tensor in forward order; a tied tensor is listed once."""
        names = [name for entry in self.entries.values() for name in entry.theirs]
        return [(name, *self.files.tensors[self._names[name]][1:]) for name in names]

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this package's parameters, by name."""
        return {ours: entry.size for ours, entry in self.entries.items()}

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield the tensor of a full name in pieces; raises ``UserError`` if a tied head differs from the table."""
        table = next(iter(self.entries[TABLE].theirs))
        if name == table and self.shape.tied and HEAD in self._names:
            copies = (self.files.pieces(self._names[name]), self.files.pieces(self._names[HEAD]))
            # Both are stored: compare them piece by piece, so that neither has to fit into memory.
            for piece, head in zip(*copies, strict=True):
                if not np.array_equal(piece, head):
                    raise not_tied(self._field)
                yield piece
            return
        yield from self.files.pieces(self._names[name])

    def span(self, name: str) -> FileSpan | None:
        """Return a tensor's location in its file; None for a table that `pieces` has to compare with a head."""
        if name in self.entries[TABLE].theirs and self.shape.tied and HEAD in self._names:
            return None
        return self.files.span(self._names[name])

    def read(self, ours: str, bounds: Bounds, dtype: np.dtype[np.generic]) -> np.ndarray:
        """Return the slice of our parameter `ours` within `bounds`, in `dtype`; zero beyond its size."""
        entry = self.entries[ours]
        value = entry.read(bounds, self._part, dtype)
        if ours == TABLE and self.shape.tied and HEAD in self._names:
            twin = TensorMap(TABLE, entry.size, {HEAD: entry.size}).read(bounds, self._part, dtype)
            if not np.array_equal(value, twin):
                raise not_tied(self._field)
        return value

    def _part(self, name: str, bounds: Bounds) -> NDArray[np.generic]:
        return self.files.read(self._names[name], bounds)
