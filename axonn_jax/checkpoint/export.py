"""Export of a checkpoint: its parameters as the tensors of a Hugging Face model, a few in memory at a time."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from numpy.typing import NDArray

from axonn_jax.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.checkpoint.naming import PARAMS
from axonn_jax.checkpoint.restore import Checkpoint, check_shapes, load
from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.entries import TensorMap, entries_of

_AT_ONCE = 64 << 20
"""Bytes of small parameters that are read together: opening a part of a checkpoint takes longer than such a read."""


class StoredParameters:
    """The parameters of a valid checkpoint under Hugging Face's names; no optimizer state is read.

    Raises ``UserError`` for a shape that no family has, and where the checkpoint is not of this shape.
    """

    def __init__(self, checkpoint: Checkpoint, shape: ModelShape, field: str):
        self._checkpoint, self._field = checkpoint, field
        count = len(checkpoint.manifest.arrays)
        if shape.layers > count:  # before all of them are listed
            raise UserError("model.layers", shape.layers, f"the layers of the checkpoint, whose arrays are {count}")
        self._entries = entries_of(shape)
        check_shapes(checkpoint, {PARAMS + entry.ours: entry.size for entry in self._entries}, field, only=PARAMS)
        self._homes = {name: (entry, at) for entry in self._entries for at, name in enumerate(entry.theirs)}
        self._held: dict[str, NDArray[Any]] = {}

    @property
    def tensors(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and shape of each tensor in the order in which a token meets them."""
        return [
            (name, np.dtype(self._stored(entry)), size)
            for entry in self._entries
            for name, size in entry.theirs.items()
        ]

    def span(self, name: str) -> None:
        """Nowhere: no file has a tensor as Hugging Face lays it out."""

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """A tensor in pieces along its first dim; quick where tensors are asked for in order."""
        entry, number = self._homes[name]
        if entry.ours not in self._held:
            self._held.clear()
            self._held = self._read(self._entries.index(entry))
        return entry.chunks(number, self._held[entry.ours])

    def _read(self, first: int) -> dict[str, NDArray[Any]]:
        """A parameter, and those behind it that are small."""
        wanted: dict[str, jax.ShapeDtypeStruct] = {}
        room = _AT_ONCE
        place = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        for entry in self._entries[first:]:
            dtype = np.dtype(self._stored(entry))
            room -= math.prod(entry.size) * dtype.itemsize
            if wanted and room < 0:
                break
            wanted[entry.ours] = jax.ShapeDtypeStruct(entry.size, dtype, sharding=place)
        try:
            loaded = load(self._checkpoint, {PARAMS + ours: want for ours, want in wanted.items()})
        except CorruptCheckpoint as fault:
            raise UserError(self._field, str(self._checkpoint.path), f"a valid checkpoint; {fault}") from None
        return {ours: np.asarray(loaded.pop(PARAMS + ours)) for ours in wanted}

    def _stored(self, entry: TensorMap) -> str:
        return self._checkpoint.manifest.arrays[PARAMS + entry.ours].dtype
