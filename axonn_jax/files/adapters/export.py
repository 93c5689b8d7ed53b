"""Export of adapters: a checkpoint's adapters on the host, and a base's tensors with adapters merged in."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.adapters.checksum import checksum_of_files
from axonn_jax.core.adapters.config import AdaptedLayer, LoraConfig, StoredLora, layers_of
from axonn_jax.core.adapters.layers import spread
from axonn_jax.core.checkpoint.naming import PARAMS
from axonn_jax.core.checkpoint.orbax import reason, stored_array
from axonn_jax.core.checkpoint.restore import Checkpoint, check_shapes
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.entries import entries_of
from axonn_jax.files.huggingface.export import Tensors
from axonn_jax.files.huggingface.files import FileSpan
from axonn_jax.files.huggingface.tensor_map import Bounds, TensorMap

Arrays = Mapping[str, NDArray[np.generic]]
"""Adapter arrays by parameter name, such as `blocks.0.attention.qkv.adapter.a`."""


class BaseTensors(Tensors, Protocol):
    """Tensors of a full model, implemented by `Pretrained` and `StoredParameters`."""

    @property
    def tensors(self) -> list[tuple[str, np.dtype[np.generic], tuple[int, ...]]]:
        """Name, dtype and shape of each tensor."""

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this package's parameters, by name."""

    def read(self, ours: str, bounds: Bounds, dtype: np.dtype) -> np.ndarray:
        """Return the slice of one of this package's parameters within `bounds`, in `dtype`."""


def checked_base(base: BaseTensors, stored: StoredLora, path: str) -> None:
    """Raise ``UserError`` if the base is not the one that the adapters were trained on."""
    wide = np.dtype(np.float32)
    bounds_of = {name: tuple((0, length) for length in size) for name, size in base.sizes.items()}
    if (
        checksum_of_files((name, base.read(name, bounds, wide)) for name, bounds in bounds_of.items())
        != stored.checksum
    ):
        raise UserError("base", path, "the base that the adapters were trained on; this one's checksum is another")


def stored_adapters(
    checkpoint: Checkpoint, stored: StoredLora, shape: ModelShape, field: str
) -> dict[str, NDArray[np.generic]]:
    """Read the adapters of a checkpoint onto the host; raises ``UserError`` if they are missing or unreadable."""
    sizes = {name: size for layer in layers_of(shape, stored.config) for name, size in layer.arrays.items()}
    check_shapes(checkpoint, {PARAMS + name: size for name, size in sizes.items()}, field, only=PARAMS)
    read = {}
    for name, size in sizes.items():
        of = checkpoint.read_as(PARAMS + name)
        part = checkpoint.path / checkpoint.manifest.arrays[of].part
        try:
            # The cache may hold the full array, at up to 8 bytes per entry.
            array = stored_array(part, of, 8 * size[0] * size[1])
            read[name] = np.asarray(array.read().result())
        except (ValueError, IndexError, OSError) as error:
            why = f"a valid checkpoint; {name}: {reason(error)}"
            raise UserError(field, str(checkpoint.path), why) from None
    return read


class MergedTensors:
    """Tensors of a base with adapters merged in, under Hugging Face's names; holds one merged parameter at a time."""

    def __init__(self, base: BaseTensors, shape: ModelShape, config: LoraConfig, arrays: Arrays):
        self._base, self._scale, self._arrays = base, config.scale, arrays
        self._homes: dict[str, tuple[AdaptedLayer, TensorMap, int]] = {}
        entries = {entry.ours: entry for entry in entries_of(shape)}
        for layer in layers_of(shape, config):
            entry = entries[f"{layer.name}.kernel"]
            assert isinstance(entry, TensorMap)
            self._homes |= {name: (layer, entry, number) for number, name in enumerate(entry.theirs)}
        self._open: tuple[str, list[NDArray[np.generic]]] = ("", [])

    @property
    def tensors(self) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each tensor, as in the base."""
        return self._base.tensors

    def span(self, name: str) -> FileSpan | None:
        """Return the location of a tensor in the base's files; None for a tensor that adapters change."""
        return None if name in self._homes else self._base.span(name)

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield a tensor in pieces along its first dim; a tensor that adapters change comes in float32."""
        if name not in self._homes:
            yield from self._base.pieces(name)
            return
        delta, at = self._delta(*self._homes[name]), 0
        for piece in self._base.pieces(name):
            yield piece.astype(np.float32) + delta[at : at + len(piece)]
            at += len(piece)

    def _delta(self, layer: AdaptedLayer, entry: TensorMap, number: int) -> np.ndarray:
        # A fused layer has several tensors, requested one after the other: keep its delta until another layer is
        # opened, and free it before the next one is computed.
        if self._open[0] != layer.name:
            self._open = ("", [])
            a, b = (self._arrays[name] for name in layer.arrays)
            delta = np.float32(self._scale) * (a @ spread(b, tuple(layer.targets.values()), np))
            self._open = (layer.name, entry.split(delta.astype(np.float32)))
        return self._open[1][number]
