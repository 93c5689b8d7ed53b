"""Pruning of a model's parameters on a mesh: choice of parameters, masks, and their state compressed or dense."""

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from axonn_jax.errors import UserError
from axonn_jax.grid import REPLICA_AXES
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.layout import PrunedLayout, lay_out
from axonn_jax.pruned.masks import magnitude_masks, random_masks
from axonn_jax.tensor.params import Params, Specs, SplitModule
from axonn_jax.tensor.specs import size_over


class KeptEntries(NamedTuple):
    """The entries of pruned parameters that are trained."""

    forms: PrunedLayout
    extra: Params
    """Positions of the kept entries, by name."""

    def compressed(self, params: Params, *, used_up: bool = False) -> Params:
        """Parameters with values in the place of the dense arrays of pruned ones, which are freed if `used_up`."""
        out: Params = {}
        for name, value in params.items():
            pruned = name in self.extra
            out[name] = self.forms.compressed(name, value, self.extra[name]) if pruned else value
            if pruned and used_up:
                jax.block_until_ready(out[name])
                value.delete()
        return out


def prunable(parts: SplitModule, layers: str) -> list[str]:
    """Return the parameters to prune: matrices in a model's attribute `layers` that have no role."""
    inside = {name: p for name, p in parts.params.items() if name.startswith(f"{layers}.")}
    return [name for name, p in inside.items() if p.ndim > 1 and name not in parts.roles]


def make_masks(config: PruneConfig, weights: Params, elsewhere: Collection[str] = ()) -> dict[str, jax.Array]:
    """Return masks of booleans for float32 weights, laid out like these; other processes make those of `elsewhere`.

    An early-bird search takes masks by magnitude. A missing file gives empty masks: a checkpoint may have the masks,
    and `train.engines.pruning` refuses to train without. Raises ``UserError`` for a file with masks of other
    parameters. Collectives: `masks.magnitude_masks`.
    """
    if config.method == "file":
        if not (path := Path(config.mask_file)).is_file():
            return {name: _placed(np.broadcast_to(False, p.shape), p.sharding) for name, p in weights.items()}
        return _read(path, weights, elsewhere)
    if config.method == "random":
        return random_masks(weights, config.density, config.scope, config.seed)
    return magnitude_masks(weights, config.density, config.scope)


class Pruner:
    """Choice of the kept entries of the parameters on one mesh.

    `prunable` are the parameters that are pruned in the whole model, `specs` the layouts of those on this mesh.
    """

    def __init__(self, config: PruneConfig, prunable: Collection[str], specs: Specs, mesh: Mesh):
        self._config, self._prunable, self._specs, self._mesh = config, prunable, specs, mesh
        self.names = tuple(name for name in prunable if name in specs)

    def masks(self, weights: Params) -> Params:
        """Return masks of the entries that the settings keep of dense weights; see `make_masks`."""
        return make_masks(self._config, {name: weights[name] for name in self.names}, self._prunable)

    def chosen(self, masks: Params) -> KeptEntries:
        """Lay out the entries that masks keep, in slots that replicas can share. Collectives: as in `lay_out`."""
        specs, multiple = {name: self._specs[name] for name in masks}, size_over(self._mesh, REPLICA_AXES)
        layout = lay_out(masks, specs, self._mesh, multiple=multiple)
        return KeptEntries(layout, layout.indices_of(masks))


def _read(path: Path, weights: Params, elsewhere: Collection[str]) -> dict[str, jax.Array]:
    try:
        with zipfile.ZipFile(path) as zipped, np.load(path) as file:
            forms = {name: _form(zipped, name) for name in file.files}
            for name, weight in weights.items():
                form = forms.get(name)
                what = "missing" if form is None else f"{form[1]} {form[0]}"
                if form is None or form[1] != np.bool_ or form[0] != weight.shape:
                    accepted = f"a file with bool {weight.shape} for {name}, which is {what}"
                    raise UserError("prune.mask_file", str(path), accepted)
            if extra := sorted(forms.keys() - weights.keys() - set(elsewhere)):
                accepted = f"a file of the pruned parameters alone; {extra[0]} is not one"
                raise UserError("prune.mask_file", str(path), accepted)
            return {name: _placed(file[name], weight.sharding) for name, weight in weights.items()}
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        accepted = f"an .npz file of arrays of booleans by parameter; {error}"
        raise UserError("prune.mask_file", str(path), accepted) from None


def _form(zipped: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array by its header, before as much memory is taken as it says."""
    with zipped.open(name if name in zipped.namelist() else f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
    return shape, dtype


def _placed(array: np.ndarray, sharding: Any) -> jax.Array:
    placed: NamedSharding = sharding
    return jax.make_array_from_callback(array.shape, placed, lambda index: array[index])
