"""Pruning of a model's parameters on a mesh: prunable parameters, masks, and compressed state."""

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import REPLICA_AXES
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.pruned.layout import PrunedLayout, lay_out
from axonn_jax.core.pruned.masks import magnitude_masks, random_masks
from axonn_jax.core.tensor.params import Params, Specs, SplitModule
from axonn_jax.core.tensor.specs import size_over


class KeptEntries(NamedTuple):
    """Trained entries of pruned parameters: their layout and indices."""

    forms: PrunedLayout
    extra: Params
    """Indices of the kept entries, by parameter."""

    def compressed(self, params: Params, *, used_up: bool = False) -> Params:
        """Return parameters with pruned ones compressed to their values; `used_up` frees the dense arrays."""
        out: Params = {}
        for name, value in params.items():
            pruned = name in self.extra
            out[name] = self.forms.compressed(name, value, self.extra[name]) if pruned else value
            # Free each dense array before the next is compressed, so that both forms of only one are in memory.
            if pruned and used_up:
                jax.block_until_ready(out[name])
                value.delete()
        return out


def prunable(parts: SplitModule, layers: str) -> list[str]:
    """Return the names of the parameters to prune: matrices without a role in the model's attribute `layers`."""
    inside = {name: p for name, p in parts.params.items() if name.startswith(f"{layers}.")}
    return [name for name, p in inside.items() if p.ndim > 1 and name not in parts.roles]


def make_masks(config: PruneConfig, weights: Params, elsewhere: Collection[str] = ()) -> dict[str, jax.Array]:
    """Return boolean masks for float32 weights, laid out like them.

    Args:
        config: Pruning settings; an early-bird search uses masks by magnitude.
        weights: Dense weights to mask, by name.
        elsewhere: Names of parameters whose masks other processes make.

    Raises:
        UserError: The mask file cannot be read, or has masks of other parameters.

    Collectives: those of `masks.magnitude_masks`.
    """
    if config.method == "file":
        # A missing file gives empty masks instead of an error: a checkpoint that is loaded later may have the masks,
        # and `engines.pruning` refuses to train without any.
        if not (path := Path(config.mask_file)).is_file():
            return {name: _on_mesh(np.broadcast_to(False, p.shape), p.sharding) for name, p in weights.items()}
        return _read(path, weights, elsewhere)
    if config.method == "random":
        return random_masks(weights, config.density, config.scope, config.seed)
    return magnitude_masks(weights, config.density, config.scope)


class Pruner:
    """Selection of the trained entries of the parameters on one mesh.

    Args:
        config: Pruning settings.
        prunable: Names of the pruned parameters of the full model.
        specs: Layouts of the parameters on this mesh, by name.
        mesh: Mesh of the parameters.
    """

    def __init__(self, config: PruneConfig, prunable: Collection[str], specs: Specs, mesh: Mesh):
        self._config, self._prunable, self._specs, self._mesh = config, prunable, specs, mesh
        self.names = tuple(name for name in prunable if name in specs)

    def masks(self, weights: Params) -> Params:
        """Return masks of the entries of dense weights to keep; see `make_masks`."""
        return make_masks(self._config, {name: weights[name] for name in self.names}, self._prunable)

    def select(self, masks: Params) -> KeptEntries:
        """Lay out the entries that masks keep; collectives: those of `lay_out`."""
        # Round slots up so that ZeRO can split optimizer state evenly over replicas.
        specs, multiple = {name: self._specs[name] for name in masks}, size_over(self._mesh, REPLICA_AXES)
        layout = lay_out(masks, specs, self._mesh, multiple=multiple)
        return KeptEntries(layout, layout.indices_of(masks))


def _read(path: Path, weights: Params, elsewhere: Collection[str]) -> dict[str, jax.Array]:
    try:
        with zipfile.ZipFile(path) as zipped, np.load(path) as file:
            forms = {name: _form(zipped, name) for name in file.files}
            for name, weight in weights.items():
                form = forms.get(name)
                actual = "missing" if form is None else f"{form[1]} {form[0]}"
                if form is None or form[1] != np.bool_ or form[0] != weight.shape:
                    accepted = f"a file with bool {weight.shape} for {name}, which is {actual}"
                    raise UserError("prune.mask_file", str(path), accepted)
            if extra := sorted(forms.keys() - weights.keys() - set(elsewhere)):
                accepted = f"a file of the pruned parameters alone; {extra[0]} is not one"
                raise UserError("prune.mask_file", str(path), accepted)
            return {name: _on_mesh(file[name], weight.sharding) for name, weight in weights.items()}
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        accepted = f"an .npz file of arrays of booleans by parameter; {error}"
        raise UserError("prune.mask_file", str(path), accepted) from None


def _form(zipped: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], object]:
    # Read the header alone: the array is only loaded once its shape is known to fit, whatever size the file claims.
    with zipped.open(name if name in zipped.namelist() else f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    return shape, dtype


def _on_mesh(array: np.ndarray, sharding: Any) -> jax.Array:
    mesh_sharding: NamedSharding = sharding
    return jax.make_array_from_callback(array.shape, mesh_sharding, lambda index: array[index])
