"""Loading of pretrained directories into a grid: parameters born sharded, of which a process reads its shards alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from numpy.typing import NDArray

from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.models.huggingface.entries import HEAD, TABLE, Entry, Window, check_tensors, file_names, not_tied
from axonn_jax.models.huggingface.families import shape_from_config
from axonn_jax.models.huggingface.files import TensorFiles
from axonn_jax.models.huggingface.pretrained import read_config
from axonn_jax.models.transformer import Transformer
from axonn_jax.models.vocabulary import fit_vocabulary
from axonn_jax.tensor.params import split_module


class Pretrained:
    """The weights of a pretrained directory, every tensor of which is there in its size.

    Config and headers are read at once, tensors part by part. `field` is what errors call the directory. Raises
    ``UserError`` for a config that is not computed, and for files that are damaged or do not fit it.
    """

    def __init__(self, directory: Path, field: str):
        self.directory, self._field = directory, field
        self.config = read_config(directory, field)
        self.shape = shape_from_config(self.config)
        self.files = TensorFiles(directory, field)
        self._names = file_names(self.files.tensors, self.shape)
        sizes = {name: self.files.tensors[given].shape for name, given in self._names.items()}
        self.entries = {entry.ours: entry for entry in check_tensors(sizes, self.shape, field)}

    @property
    def tensors(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Full name, dtype and shape of each tensor in the order in which a token meets them; a tied one once."""
        names = [name for entry in self.entries.values() for name in entry.theirs]
        return [(name, *self.files.tensors[self._names[name]][1:]) for name in names]

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """The tensor of a full name in pieces; raises ``UserError`` where a tied head is not the table."""
        table = next(iter(self.entries[TABLE].theirs))
        if name == table and self.shape.tied and HEAD in self._names:
            both = (self.files.pieces(self._names[name]), self.files.pieces(self._names[HEAD]))
            for piece, head in zip(*both, strict=True):
                if not np.array_equal(piece, head):
                    raise not_tied(self._field)
                yield piece
            return
        yield from self.files.pieces(self._names[name])

    def read(self, ours: str, window: Window, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A part of one of our parameters, for which nothing else is read; zero beyond its size."""
        entry = self.entries[ours]
        made = entry.read(window, self._part, dtype)
        if ours == TABLE and self.shape.tied and HEAD in self._names:
            twin = Entry(TABLE, entry.size, {HEAD: entry.size}).read(window, self._part, dtype)
            if not np.array_equal(made, twin):
                raise not_tied(self._field)
        return made

    def _part(self, name: str, window: Window) -> NDArray[Any]:
        return self.files.read(self._names[name], window)

    def load(self, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Parameters of these names in the shapes, types and layouts asked for; no collectives.

        Each shard is read once and copied to its devices; shapes may be those of a padded vocabulary.
        """
        return {name: self._born(name, want) for name, want in abstract.items()}

    def _born(self, name: str, want: jax.ShapeDtypeStruct) -> jax.Array:
        sharding: Any = want.sharding
        windows: dict[Window, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(want.shape).items():
            window = tuple(part.indices(size)[:2] for part, size in zip(index, want.shape, strict=True))
            windows.setdefault(window, []).append(device)
        shards = []
        for window, devices in windows.items():
            value = self.read(name, window, np.dtype(want.dtype))
            places = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in devices]
            # copies: an array that is memory of numpy's cannot be donated to a step
            shards += [jax.device_put(value, place, may_alias=False) for place in places]
        return jax.make_array_from_single_device_arrays(want.shape, sharding, shards)


def from_pretrained(directory: str | Path, grid: Grid) -> Transformer:
    """Returns the model in a pretrained directory, in float32 and laid out over a grid; no collectives.

    The directory is Hugging Face's (config.json and safetensors) or a converted one. Every process of the grid calls
    it and reads the parts of the files that its devices hold, nothing else; no parameter is ever whole in one of them.
    Raises ``UserError`` for a pipeline, and for what cannot be read or is not computed.
    """
    if grid.shape.pipe > 1:
        accepted = "1; in a pipeline, Trainer.load(directory, weights_only=True) or checkpoint.weights of a config"
        raise UserError("grid.pipe", grid.shape.pipe, accepted)
    pretrained = Pretrained(Path(directory), "directory")
    shape = pretrained.shape
    shape.check_grid(grid.shape)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    parts = split_module(fit_vocabulary(model, grid.shape))
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(grid.mesh, parts.specs[name]))
        for name, value in parts.params.items()
    }
    merged: Any = parts.merge(pretrained.load(abstract))
    return merged  # type: ignore[no-any-return]
