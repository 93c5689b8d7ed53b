"""Flax Linen models on a 4D grid: their loss runs layers 4D-sharded, everything else stays unchanged."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.core import meta
from jax import lax
from jax.sharding import Mesh, NamedSharding

from axonn_jax.errors import UserError, typed_arguments
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.tensor.parallelize.api import choose_overrides, put
from axonn_jax.tensor.parallelize.layers import sharded
from axonn_jax.tensor.parallelize.layouts import PLAN, LayerPlan, gather_param, without_z
from axonn_jax.tensor.parallelize.linen_layers import LayerCall, MethodCall, intercepted
from axonn_jax.tensor.parallelize.linen_plan import Key, TreeLeaf, plan_loss
from axonn_jax.tensor.parallelize.transfers import Entry
from axonn_jax.tensor.params import key_of
from axonn_jax.tensor.specs import values_of

Loss = Callable[..., Any]
"""Loss of parameters and a batch, and of a key where it takes three: a scalar, or a scalar and anything else."""


def takes_key(loss: Loss) -> bool:
    """True if a loss has a third argument without a default, or of default None: a key, for dropout and the like."""
    plain = getattr(loss, "plain", loss)
    arguments = inspect.signature(plain).parameters.values()
    places = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 2 and places[2].default in (inspect.Parameter.empty, None)


_UNBOUND = re.compile(r"unbound axis name: ([^.\s]+)")


class MappedAxes:
    """Axes that a loss written for `jax.pmap` names, unbound by trying, each bound with size one.

    The rows of a batch are one array, of which `lax.pmean` over devices is the mean itself.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def call(self, run: Callable[[], Any]) -> Any:
        """Call a function that may be traced several times; its result must be a tree of arrays."""
        while True:
            called = run
            for name in self._names:
                called = partial(_bound, name, called)
            try:
                return called()
            except NameError as error:
                unbound = _UNBOUND.search(str(error))
                if unbound is None or unbound[1] in self._names:
                    raise
                self._names.append(unbound[1])


def _bound(name: str, run: Callable[[], Any]) -> Any:
    return jax.vmap(lambda _: run(), out_axes=None, axis_name=name)(jnp.zeros(1))


@dataclass(frozen=True, eq=False)
class LinenLoss:
    """Loss of a Linen model, ``loss(params, batch)``, whose layers run 4D-sharded."""

    plain: Loss
    """The function without layouts."""
    mesh: Mesh
    plans: Mapping[Key, LayerPlan]
    layouts: Any
    """A tree as the parameters', of `linen_plan.TreeLeaf`."""
    entries: tuple[Entry, ...]
    """Layers and other modules with parameters."""
    dtype: Any = None
    """The computation's dtype wherever a module names none; None leaves it to the modules."""
    row_axes: tuple[str, ...] = BATCH_AXES
    """Axes that split rows."""
    mapped_axis: str | None = None
    """Name of an axis that is mapped over around the loss: BatchNorm takes its statistics over that too."""

    @property
    def specs(self) -> Any:
        """The parameters' layouts: a tree as theirs, of `PartitionSpec`."""
        return jax.tree.map(lambda leaf: leaf.spec, self.layouts)

    def __call__(self, params: Any, batch: Any, *key: jax.Array) -> Any:
        """Return what the plain function returns."""
        if self.row_axes:
            params = jax.tree.map(self._without_z, params, self.layouts)
        if self.dtype is not None:
            params = jax.tree.map(self._cast, params, self.layouts)
        with intercepted(self, self._run):
            return self.plain(params, batch, *key)

    def gather_spread(self, params: Any) -> Any:
        """Return the parameters with those that are spread gathered, by `layouts.gather_param`.

        For traced functions, before the loss; without it XLA chooses what to move.
        """

        def gather(value: jax.Array, leaf: TreeLeaf) -> jax.Array:
            return value if leaf.spec == leaf.used else gather_param(value, self.mesh, leaf.used)

        return jax.tree.map(gather, params, self.layouts)

    def with_row_axes(self, axes: tuple[str, ...], mapped_axis: str | None = None) -> "LinenLoss":
        """Return the loss with rows split over these axes, slowest first, in every layer; it recomputes nothing.

        A program that maps over replicas by itself (``jax.vmap`` with ``spmd_axis_name="data"``) calls it with one
        replica's rows, which lie over ``("z",)``; ``mapped_axis`` is its ``axis_name``. Without axes the loss runs as
        Flax wrote it, in a manual region over ``mapped_axis``.
        """
        planned = self.plans.items() if axes else ()
        plans = {key: replace(plan, row_axes=axes, regathers=False) for key, plan in planned}
        return replace(self, plans=plans, row_axes=axes, mapped_axis=mapped_axis)

    def with_dtype(self, dtype: Any) -> "LinenLoss":
        """Return the loss that computes in this dtype wherever a module names none.

        Layers that are split cast parameters themselves, so that gradients are reduced in the parameters' dtype.
        """
        return replace(self, dtype=dtype)

    def _without_z(self, value: jax.Array, leaf: TreeLeaf) -> jax.Array:
        """Gather over `z` what XLA multiplies with.

        XLA computes `x @ w` wrong on a mesh of `data`, `z`, `y` and `x` where rows lie over `data` and `z` and both
        dims of `w` are split, one of them over `z` too (jaxlib 0.10.2).
        """
        inside = NamedSharding(self.mesh, without_z(leaf.used))
        return lax.with_sharding_constraint(value, inside) if leaf.shared else value

    def _cast(self, value: jax.Array, leaf: TreeLeaf) -> jax.Array:
        return value if leaf.in_layer or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(self.dtype)

    def _run(self, call: MethodCall) -> Any:
        if isinstance(call.layer, LayerCall):
            plan = self.plans.get(call.layer.key)
            if plan is not None and plan.sharded:
                layer_call = call.layer if self.dtype is None else call.layer.in_dtype(self.dtype)
                layer = layer_call.layer
                setattr(layer, PLAN, plan)
                layer.__class__ = sharded(type(layer))
                return layer_call.run(layer)
        if self.mapped_axis is not None and call.base is linen.BatchNorm and call.module.axis_name != self.mapped_axis:
            return call.of(call.module.clone(parent=call.module.scope, axis_name=self.mapped_axis))
        return call.by_rows(self.mesh, self.row_axes)


@typed_arguments
def parallelize_linen(
    loss: Loss, params: Any, grid: Grid, batch: Any, *, overrides: Mapping[str, str] | None = None
) -> tuple[LinenLoss, Any]:
    """Return the loss of a Flax Linen model with layers 4D-sharded over the grid, and its parameters placed on it.

    The loss is traced once, not run. Its Dense, DenseGeneral, Einsum, Conv, ConvTranspose, Embed, LayerNorm and RMSNorm
    modules (alone, inside MultiHeadDotProductAttention, `nn.scan`, `nn.remat` and modules of your own) are split over
    the axes of the grid, with explicit collectives; parameters of other modules are split as well, and gathered by XLA.
    Results, parameter names and the tree stay. Names of axes (`nn.with_partitioning`, `nn.with_logical_constraint`)
    count for nothing: layouts are the grid's. `sharding_report` lists all modules.

    Args:
        loss: A function ``loss(params, batch)``, or of a key too, that applies Linen modules and returns a scalar, or
            (scalar, aux).
        params: The tree of parameters, arrays or shapes, in boxes of `nn.Partitioned` or not.
        grid: The grid of devices, without a pipeline.
        batch: A batch of a step's shape, arrays or shapes.
        overrides: Map from patterns of paths in ``params`` (``"params.decoder.*.out"``) to "replicated", or to the axis
            to contract over, "x" or "y" (for an embedding or a norm: the axis of its features); the last pattern that
            matches counts.

    Raises:
        UserError: The grid has a pipeline, the batch no rows, the parameters are not those of the loss's modules, the
            loss returns anything but a scalar, lays an array out on another mesh, or an override matches nothing.
    """
    batch = values_of(batch)
    _check(loss, params, grid, batch)
    with grid.entered():
        return _parallelized(loss, params, grid, batch, overrides or {})


def _parallelized(
    loss: Loss, params: Any, grid: Grid, batch: Any, overrides: Mapping[str, str]
) -> tuple[LinenLoss, Any]:
    key, axes = (key_of(0),) if takes_key(loss) else (), MappedAxes()

    def traced(params: Any, batch: Any) -> Any:
        return axes.call(lambda: loss(params, batch, *key))

    plain = jax.tree.map(_unboxed, params, is_leaf=meta.is_axis_metadata)
    try:
        plans, leaves, entries = plan_loss(
            traced, grid.mesh, plain, batch, lambda layers: choose_overrides(overrides, layers)
        )
    except _OTHER_PARAMS as error:
        reason = str(error).split(" (http")[0]
        names = ", ".join(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
        raise UserError("params", names, f"the parameters of every layer that loss applies: {reason}") from None
    layouts = jax.tree.unflatten(jax.tree.structure(plain), leaves)
    sharded_params = jax.tree.map(lambda value, leaf: put(value, NamedSharding(grid.mesh, leaf.spec)), plain, layouts)
    return LinenLoss(loss, grid.mesh, plans, layouts, entries), sharded_params


_OTHER_PARAMS = (
    errors.ScopeParamNotFoundError,
    errors.ScopeParamShapeError,
    errors.ScopeCollectionNotFound,
    errors.ApplyScopeInvalidVariablesStructureError,
)
"""Flax's errors for parameters that are not a module's."""


def _unboxed(leaf: Any) -> Any:
    """The value of an `nn.Partitioned` or the like, without the layout that its names ask for."""
    if not meta.is_axis_metadata(leaf):
        return leaf
    with linen.logical_axis_rules(()):
        return leaf.unbox(apply_constraint=False) if isinstance(leaf, meta.Partitioned) else leaf.unbox()


def _check(loss: Any, params: Any, grid: Any, batch: Any) -> None:
    if grid.shape.pipe > 1:
        raise UserError("grid.pipe", grid.shape.pipe, "1 for parallelize_linen")
    if isinstance(loss, linen.Module | LinenLoss) or not callable(loss):
        raise UserError("loss", type(loss).__name__, "a function of (params, batch) that is not parallelized already")
    if not jax.tree.leaves(params) or not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(params)):
        raise UserError("params", type(params).__name__, "a tree of arrays, as module.init(...) returns it")
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, str | bytes) or getattr(getattr(leaf, "dtype", None), "kind", "") in ("O", "S", "U"):
            raise UserError("batch", f"{type(leaf).__name__} in it", "numbers in arrays")
    if not any(getattr(leaf, "shape", ())[:1] > (0,) for leaf in jax.tree.leaves(batch)):
        raise UserError("batch", jax.tree.map(jnp.shape, batch), "at least one array, with rows in its first dim")
