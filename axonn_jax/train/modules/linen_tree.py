"""Parameters of a Linen model, in a tree, taken apart."""

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from axonn_jax.errors import UserError
from axonn_jax.tensor.parallelize.layouts import Stored, further_layouts
from axonn_jax.tensor.parallelize.linen import LinenLoss, takes_key
from axonn_jax.tensor.parallelize.linen_layers import COUNTERPARTS
from axonn_jax.tensor.parallelize.mapped_axes import MappedAxes
from axonn_jax.tensor.params import Params, copied
from axonn_jax.train.modules.apart import (
    REPLICAS,
    ROW_AXES,
    Apart,
    Loss,
    LossResult,
    Way,
    check_real,
    checked,
    in_dtype,
    is_float,
    keys,
    one_device_each,
    say_first,
    spec_of_value,
)
from axonn_jax.train.modules.own_tree import GivenTree, OwnTree


class TreeApart:
    """Parameters of a Linen model, in a tree, taken apart; `apart.Apart` describes the members.

    A tree with "params" at its root holds collections: the others are state, which a call changes by returning
    collections of these names among its numbers.

    Args:
        tree: Parameters on the mesh, as `parallelize_linen` returns them.
        loss: Its loss, as `parallelize_linen` returns it, or any other, for which parameters are spread over the mesh.
        compute: Dtype of the computation wherever a module names none; None leaves it to the modules.
        mesh: Mesh of the parameters.
    """

    def __init__(self, tree: Any, loss: Loss, compute: Any, mesh: Mesh):
        self._axes = MappedAxes()
        self._loss, self._losses, self._compute = loss, _losses(loss, compute), compute
        leaves, self._tree = tree_flatten_with_path(tree)
        arrays = {keystr(path, simple=True, separator="."): jnp.asarray(value) for path, value in leaves}
        self._names = list(arrays)
        self._collections = set(tree) - {"params"} if isinstance(tree, Mapping) and "params" in tree else set()
        for name, value in arrays.items():
            if name.split(".")[0] not in self._collections:
                check_real(name, value)
        state = {n for n, v in arrays.items() if n.split(".")[0] in self._collections or not is_float(v)}
        self.params = {name: value.astype(jnp.float32) for name, value in arrays.items() if name not in state}
        self.dtypes = {name: value.dtype for name, value in arrays.items()}
        self.specs = {name: spec_of_value(arrays[name]) for name in self.params}
        self.split = isinstance(loss, LinenLoss)
        if not self.split:
            stored = {name: Stored(value.shape, value.nbytes, P()) for name, value in self.params.items()}
            for name, spec in further_layouts(stored, mesh).items():
                self.specs[name] = P(*spec, *[None] * (self.params[name].ndim - len(spec)))
        replicated = NamedSharding(mesh, P())
        self.carried = {name: copied(arrays[name], replicated) for name in state}
        holders = loss.holders if isinstance(loss, LinenLoss) else ()
        split = [(holder.path, holder.plan.kind) for holder in holders if holder.plan.sharded]
        named = (f"{path}.{_LINEN_KERNELS[kind]}" for path, kind in split if kind in _LINEN_KERNELS)
        self.kernels = tuple(name for name in named if name in self.params)
        self.draws = self._keyed = takes_key(loss)
        self.tree: OwnTree = self._own_tree(tree)

    def _own_tree(self, tree: Any) -> GivenTree:
        """Return the tree of which an optimizer has the parameters: beside other collections that of "params"."""
        names, structure = self._names, self._tree
        if self._collections:
            names = [name for name in names if name.split(".")[0] == "params"]
            structure = jax.tree.structure(tree["params"])
        return GivenTree(structure, names, frozenset(self.params))

    def exact(self) -> Apart:  # noqa: D102
        own = copy(self)
        own._losses = _losses(self._loss, None)
        return own

    def with_loss(self, loss: Loss) -> Apart:  # noqa: D102
        own = copy(self)
        own._loss, own._losses, own._keyed = loss, _losses(loss, self._compute), takes_key(loss)
        own._axes, own.split = MappedAxes(), isinstance(loss, LinenLoss)
        return own

    def run(  # noqa: D102
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, *, training: bool, way: Way
    ) -> LossResult:
        called = partial(self._run, params, carried, key, rows, training, way)
        return self._axes.call(called)  # type: ignore[no-any-return]

    def _run(
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, way: Way
    ) -> LossResult:
        if self._keyed and not training:  # said once, when traced
            say_first("evaluate: the loss takes a key and draws as in training; evaluate(loss=) calls another")
        tree, function = self.restored(params, carried), self._losses[way]
        tree = function.gather_spread(tree) if isinstance(function, LinenLoss) else tree
        loss, aux = checked(function(tree, rows, *keys(self._keyed, key)))
        changed: dict[str, jax.Array] = {}
        if isinstance(aux, Mapping) and (given := self._collections & set(aux)):
            leaves, _ = tree_flatten_with_path({name: aux[name] for name in given})
            named = {keystr(path, simple=True, separator="."): value for path, value in leaves}
            if strange := [name for name in named if name not in carried]:
                accepted = f"state under the names that it has, as {next(iter(carried), 'none')}"
                raise UserError("loss", f"{strange[0]} among its numbers", accepted)
            changed = {name: value.astype(carried[name].dtype) for name, value in named.items()}
            aux = {name: value for name, value in aux.items() if name not in given}
        return LossResult(loss, aux, changed)

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:  # noqa: D102
        values = {**carried, **params}
        return jax.tree.unflatten(self._tree, [in_dtype(values[name], self.dtypes[name]) for name in self._names])


_LINEN_KERNELS = {
    base.__name__: form.params[0]
    for base, form in COUNTERPARTS.items()
    if not form.norm and not issubclass(form.kind, nnx.Embed)
}
"""Name of the kernel by Linen's type of a layer."""


def _losses(loss: Loss, compute: Any) -> dict[Way, Loss]:
    """Return a loss of Linen parameters by the way in which it runs."""
    plain = getattr(loss, "plain", loss)
    plain = plain if compute is None else partial(_computed_in, plain, compute)
    if not isinstance(loss, LinenLoss):
        return {"parts": plain, "whole": plain, "xla": plain}
    split = loss if compute is None else loss.with_dtype(compute)
    axes = () if one_device_each(loss.mesh) else ROW_AXES
    return {"parts": split.with_row_axes(axes, REPLICAS), "whole": split, "xla": plain}


def _computed_in(loss: Loss, dtype: Any, tree: Any, *given: Any) -> Any:
    """Call a loss with its parameters in another dtype."""
    return loss(jax.tree.map(lambda value: value.astype(dtype) if is_float(value) else value, tree), *given)
