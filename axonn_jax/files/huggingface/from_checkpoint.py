"""Export of a checkpoint's parameters as Hugging Face tensors, with one piece of a parameter in memory at a time."""

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.checkpoint.naming import PARAMS
from axonn_jax.core.checkpoint.orbax import reason, stored_array
from axonn_jax.core.checkpoint.restore import Checkpoint, check_shapes
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.entries import entries_of
from axonn_jax.files.huggingface.files import DTYPES
from axonn_jax.files.huggingface.tensor_map import Bounds, EntryMap, ExpertMap

if TYPE_CHECKING:
    import tensorstore


class StoredParameters:
    """Parameters of a valid checkpoint, or their averages, under Hugging Face's names.

    Args:
        checkpoint: A valid checkpoint.
        shape: Shape of its model.
        field: The setting that named the checkpoint, for messages.

    Raises:
        UserError: No model family has this shape, the checkpoint has another shape, or a nonzero parameter has no
            tensor in the family.
    """

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape, field: str):
        self._checkpoint, self._field = checkpoint, field
        count = len(checkpoint.manifest.arrays)
        # Before the entries are listed: a forged shape may have more layers than fit into memory.
        if shape.layers > count:
            raise UserError("model.layers", shape.layers, f"the layers of the checkpoint, whose arrays are {count}")
        self._entries = entries_of(shape)
        check_shapes(checkpoint, {PARAMS + entry.ours: entry.size for entry in self._entries}, field, only=PARAMS)
        supported = [str(dtype) for dtype in DTYPES.values()]
        for entry in self._entries:
            if (stored := checkpoint.manifest.arrays[PARAMS + entry.ours].dtype) not in supported:
                raise UserError(f"{field}: dtype of {entry.ours}", stored, f"one of {', '.join(supported)}")
        self._homes = {name: (entry, at) for entry in self._entries for at, name in enumerate(entry.theirs)}
        self._open: tuple[str, Any] = ("", None)
        for entry in self._entries:
            if isinstance(entry, ExpertMap) and not entry.theirs and np.any(self._part(entry, ((0, entry.size[0]),))):
                raise entry.not_zero()

    @property
    def tensors(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...]]]:
        """Name, dtype and shape of each tensor, in the order of the forward pass."""
        return [(name, self._dtype(entry), size) for entry in self._entries for name, size in entry.theirs.items()]

    def span(self, name: str) -> None:
        """Return None: no file stores a tensor in Hugging Face's layout."""

    def read(self, ours: str, bounds: Bounds, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
        """Return the part within `bounds` of one of this package's parameters."""
        entry = next(entry for entry in self._entries if entry.ours == ours)
        return self._part(entry, bounds).astype(dtype)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of this package's parameters."""
        return {entry.ours: entry.size for entry in self._entries}

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield a tensor in pieces along the first dim; fast if tensors are read in the order of `tensors`."""
        entry, number = self._homes[name]
        return entry.chunks(number, partial(self._part, entry), self._dtype(entry).itemsize)

    def _part(self, entry: EntryMap, bounds: Bounds) -> NDArray[np.generic]:
        try:
            return np.asarray(self._array(entry)[tuple(slice(*ends) for ends in bounds)].read().result())
        except (ValueError, IndexError, OSError) as error:
            accepted = f"a valid checkpoint; {entry.ours}: {reason(error)}"
            raise UserError(self._field, str(self._checkpoint.path), accepted) from None

    def _array(self, entry: EntryMap) -> "tensorstore.TensorStore":
        if self._open[0] != entry.ours:
            self._open = ("", None)  # free the cache of the previous array first
            # Cache the full parameter: one entry may hold several tensors, each of which would read it again.
            size = math.prod(entry.size) * self._dtype(entry).itemsize
            name = self._checkpoint.read_as(PARAMS + entry.ours)
            part = self._checkpoint.path / self._checkpoint.manifest.arrays[name].part
            self._open = (entry.ours, stored_array(part, name, 2 * size))
        return self._open[1]

    def _dtype(self, entry: EntryMap) -> np.dtype[np.generic]:
        return np.dtype(self._checkpoint.manifest.arrays[PARAMS + entry.ours].dtype)
