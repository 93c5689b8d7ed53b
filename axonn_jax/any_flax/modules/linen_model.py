"""Linen models, given as a tree of parameters, as pure functions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from axonn_jax.any_flax.modules.loss_model import (
    REPLICAS,
    ROW_AXES,
    Loss,
    LossModel,
    LossResult,
    Strategy,
    check_real,
    in_dtype,
    is_float,
    say_first,
)
from axonn_jax.any_flax.modules.param_tree import LinenTree
from axonn_jax.any_flax.parallelize.kinds import Kernel
from axonn_jax.any_flax.parallelize.layouts import Stored, further_layouts
from axonn_jax.any_flax.parallelize.linen import LinenLoss
from axonn_jax.core.errors import UserError
from axonn_jax.core.tensor.params import Params


class LinenLossModel(LossModel):
    """A Linen model, as a tree of parameters, and its loss.

    A tree with "params" at its root holds collections. The other collections are state, which a loss updates by
    returning collections of the same names among its metrics.

    Args:
        tree: Parameters on the mesh, as returned by `parallelize_linen`.
        loss: Loss returned by `parallelize_linen`, or any other, for which parameters are sharded over the mesh and
            gathered where it uses them.
        compute: Dtype of the computation where a module sets none; None leaves it to the modules.
        mesh: Mesh of the parameters.
    """

    def __init__(self, tree: Any, loss: Loss, compute: Any, mesh: Mesh):
        leaves, self._tree = tree_flatten_with_path(tree)
        arrays = {keystr(path, simple=True, separator="."): _array(value) for path, value in leaves}
        self._names = list(arrays)
        self._collections = set(tree) - {"params"} if isinstance(tree, Mapping) and "params" in tree else set()
        if isinstance(tree, Mapping) and "params" in tree:
            self.collections = frozenset(tree)
        of_params = {n: value for n, value in arrays.items() if n.split(".")[0] not in self._collections}
        for name, value in of_params.items():
            check_real(name, value)
        trained = {name for name, value in of_params.items() if is_float(value)}
        super().__init__(arrays, trained, loss, compute, mesh, replicate_state=True)
        if not self.split:
            stored = {name: Stored(value.shape, 4 * value.size, P()) for name, value in self.params.items()}
            for name, spec in further_layouts(stored, mesh).items():
                self.specs[name] = P(*spec, *[None] * (self.params[name].ndim - len(spec)))
        entries = loss.entries if isinstance(loss, LinenLoss) else ()
        split = [(entry.path, entry.plan.of) for entry in entries if entry.plan.sharded]
        candidates = (f"{path}.{of.name}" for path, of in split if isinstance(of, Kernel) and of.name != "embedding")
        self.kernels = tuple(name for name in candidates if name in self.params)
        names, structure = self._names, self._tree
        if self._collections:  # Flax's TrainState gives an optimizer the collection "params" alone
            names = [name for name in names if name.split(".")[0] == "params"]
            structure = jax.tree.structure(tree["params"])
        self.tree = LinenTree(structure, names, frozenset(self.params))

    @property
    def split(self) -> bool:  # noqa: D102
        return isinstance(self.loss, LinenLoss)

    def compute_loss(  # noqa: D102
        self, params: Mapping[str, jax.Array], carried: Params, key: Any, rows: Any, training: bool, strategy: Strategy
    ) -> LossResult:
        if self.keyed and not training:  # printed once, because this runs while tracing
            say_first("evaluate: the loss takes a key and draws as in training; evaluate(loss=) calls another")
        tree, function = self.restored(params, carried), self._loss(strategy)
        if isinstance(function, LinenLoss) and not self.unsharded:
            tree = function.gather_spread(tree)
        loss, aux = self.result(function, tree, rows, key)
        changed: dict[str, jax.Array] = {}
        if isinstance(aux, Mapping) and (returned := self._collections & set(aux)):
            leaves, _ = tree_flatten_with_path({name: aux[name] for name in returned})
            new_state = {keystr(path, simple=True, separator="."): value for path, value in leaves}
            if strange := [name for name in new_state if name not in carried]:
                accepted = f"state under the names that it has, as {next(iter(carried), 'none')}"
                raise UserError("loss", f"{strange[0]} among its numbers", accepted)
            changed = {name: value.astype(carried[name].dtype) for name, value in new_state.items()}
            aux = {name: value for name, value in aux.items() if name not in returned}
        return LossResult(loss, aux, changed)

    def _loss(self, strategy: Strategy) -> Loss:
        loss, compute = self.loss, self.compute
        if isinstance(loss, LinenLoss) and strategy != "xla":
            split = loss if compute is None else loss.with_dtype(compute)
            axes = () if self.unsharded else ROW_AXES
            return split if strategy == "whole" else split.with_row_axes(axes, REPLICAS)
        plain = getattr(loss, "plain", loss)
        return plain if compute is None else partial(_computed_in, plain, compute)

    def restored(self, params: Mapping[str, jax.Array], carried: Params) -> Any:  # noqa: D102
        values = {**carried, **params}
        return jax.tree.unflatten(self._tree, [in_dtype(values[name], self.dtypes[name]) for name in self._names])


def _array(value: Any) -> Any:
    return value if isinstance(value, jax.ShapeDtypeStruct) else jnp.asarray(value)


def _computed_in(loss: Loss, dtype: Any, tree: Any, *args: Any) -> Any:
    """Call a loss with its floating-point parameters in another dtype."""
    return loss(jax.tree.map(lambda value: value.astype(dtype) if is_float(value) else value, tree), *args)
