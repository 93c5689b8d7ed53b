"""Parallelization of Flax Linen models: the loss runs its layers 4D-sharded, everything else stays unchanged."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.core import meta
from jax import lax
from jax.sharding import Mesh, NamedSharding

from axonn_jax.any_flax.parallelize.api import choose_overrides, put
from axonn_jax.any_flax.parallelize.layers import sharded
from axonn_jax.any_flax.parallelize.layouts import PLAN, LayerPlan, gather_param, without_z
from axonn_jax.any_flax.parallelize.linen_layers import LayerCall, MethodCall, intercepted
from axonn_jax.any_flax.parallelize.linen_plan import Key, TreeLeaf, plan_loss
from axonn_jax.any_flax.parallelize.transfers import Entry
from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.grid import BATCH_AXES, Grid
from axonn_jax.core.tensor.params import key_of
from axonn_jax.core.tensor.specs import values_of

Loss = Callable[..., Any]
"""Function of parameters and a batch, and optionally of a key, that returns a scalar or (scalar, aux)."""


def takes_key(loss: Loss) -> bool:
    """True if a loss takes a random key: a third positional argument whose default, if any, is None."""
    plain = getattr(loss, "plain", loss)
    arguments = inspect.signature(plain).parameters.values()
    places = [p for p in arguments if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(places) > 2 and places[2].default in (inspect.Parameter.empty, None)


_UNBOUND = re.compile(r"unbound axis name: ([^.\s]+)")


class MappedAxes:
    """Binds, with size one, the axes that a loss written for `jax.pmap` names.

    All rows of a batch are in one array here, so `lax.pmean` over devices is the identity.
    """

    def __init__(self) -> None:
        # Found by trial: each failed trace names one unbound axis.
        self._names: list[str] = []

    def call(self, run: Callable[[], Any]) -> Any:
        """Return the result of a function, which must be a tree of arrays; it may be traced several times."""
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
    """The loss without layouts."""
    mesh: Mesh
    plans: Mapping[Key, LayerPlan]
    layouts: Any
    """Tree of `linen_plan.TreeLeaf` with the structure of the parameters."""
    entries: tuple[Entry, ...]
    """Layers and other modules with parameters."""
    dtype: Any = None
    """Dtype of the computation in modules that set none; None leaves it to the modules."""
    row_axes: tuple[str, ...] = BATCH_AXES
    """Axes that split rows."""
    mapped_axis: str | None = None
    """Name of an axis mapped over around the loss, over which BatchNorm takes its statistics as well."""

    @property
    def specs(self) -> Any:
        """Tree of `PartitionSpec` with the structure of the parameters."""
        return jax.tree.map(lambda leaf: leaf.spec, self.layouts)

    def __call__(self, params: Any, batch: Any, *key: jax.Array) -> Any:
        """Return the result of the plain loss."""
        if self.row_axes:
            params = jax.tree.map(self._without_z, params, self.layouts)
        if self.dtype is not None:
            params = jax.tree.map(self._cast, params, self.layouts)
        with intercepted(self, self._run):
            return self.plain(params, batch, *key)

    def gather_spread(self, params: Any) -> Any:
        """Return the parameters, with spread ones gathered to the layouts they compute in (`layouts.gather_param`).

        Call this in a traced function before the loss; otherwise XLA chooses between moving parameters or activations.
        """

        def gather(value: jax.Array, leaf: TreeLeaf) -> jax.Array:
            return value if leaf.spec == leaf.used else gather_param(value, self.mesh, leaf.used)

        return jax.tree.map(gather, params, self.layouts)

    def with_row_axes(self, axes: tuple[str, ...], mapped_axis: str | None = None) -> "LinenLoss":
        """Return the loss with rows split over other axes, and without recomputation.

        A program that maps over replicas itself (``jax.vmap`` with ``spmd_axis_name="data"``) calls the result with one
        replica's rows, which are split over ``("z",)``.

        Args:
            axes: Axes that split rows, slowest first. Without any, the loss runs as Flax wrote it, in a manual region
                over `mapped_axis`.
            mapped_axis: The `axis_name` of the program's map.
        """
        planned = self.plans.items() if axes else ()
        plans = {key: replace(plan, row_axes=axes, regathers=False) for key, plan in planned}
        return replace(self, plans=plans, row_axes=axes, mapped_axis=mapped_axis)

    def with_dtype(self, dtype: Any) -> "LinenLoss":
        """Return the loss that computes in `dtype` in every module that sets no dtype.

        Sharded layers cast their parameters themselves, so that gradients are reduced in the parameters' dtype.
        """
        return replace(self, dtype=dtype)

    def _without_z(self, value: jax.Array, leaf: TreeLeaf) -> jax.Array:
        # Products outside of layers are XLA's. It computes `x @ w` wrong on a mesh of data, z, y and x where rows are
        # split over data and z, and both dims of `w` are split, one of them over z too (jaxlib 0.10.2).
        inside = NamedSharding(self.mesh, without_z(leaf.used))
        return lax.with_sharding_constraint(value, inside) if leaf.shared else value

    def _cast(self, value: jax.Array, leaf: TreeLeaf) -> jax.Array:
        return value if leaf.in_layer or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(self.dtype)

    def _run(self, call: MethodCall) -> Any:
        # A layer without a sharded plan falls through to Flax's own call.
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
    """Return a Flax Linen model's loss with its layers 4D-sharded, and its parameters laid out on the grid.

    The loss is traced once, not run. Its Dense, DenseGeneral, Einsum, Conv, ConvTranspose, Embed, LayerNorm and RMSNorm
    modules (standalone, or inside MultiHeadDotProductAttention, `nn.scan`, `nn.remat` and your own modules) are split
    over the grid's axes with explicit collectives. Parameters of other modules are split too, and XLA gathers them.
    Results, parameter names and the tree's structure stay the same. Axis names (`nn.with_partitioning`,
    `nn.with_logical_constraint`) are ignored: the grid determines all layouts. `sharding_report` lists all modules.

    Args:
        loss: A function ``loss(params, batch)``, optionally with a key as third argument, that applies Linen modules
            and returns a scalar or (scalar, aux).
        params: The tree of parameters, arrays or shapes, boxed in `nn.Partitioned` or not.
        grid: The grid of devices, without a pipeline.
        batch: A batch with the shape of a step's, arrays or shapes.
        overrides: Map from path patterns in ``params`` (``"params.decoder.*.out"``) to "replicated", or to the axis to
            contract over, "x" or "y" (for an embedding or a norm: the axis of its features); the last matching pattern
            wins.

    Raises:
        UserError: The grid has a pipeline, the batch has no rows, the parameters do not belong to the loss's modules,
            the loss does not return a scalar or lays an array out on another mesh, or an override matches nothing.
    """
    batch = values_of(batch)
    _check(loss, params, batch)
    if grid.shape.pipe > 1:
        accepted = "1 for parallelize_linen; in a pipeline ax.Trainer(params, ..., loss=loss) splits its stages' layers"
        raise UserError("grid.pipe", grid.shape.pipe, accepted)
    with grid.entered():
        return parallelized_linen_on(grid.mesh, loss, params, batch, overrides or {})


def parallelized_linen_on(
    mesh: Mesh, loss: Loss, params: Any, batch: Any, overrides: Mapping[str, str] = MappingProxyType({})
) -> tuple[LinenLoss, Any]:
    """Return a loss with its layers split over a mesh, and its parameters there; see `parallelize_linen`."""
    key, axes = (key_of(0),) if takes_key(loss) else (), MappedAxes()

    def traced(params: Any, batch: Any) -> Any:
        return axes.call(lambda: loss(params, batch, *key))

    plain = unboxed(params)
    try:
        plans, leaves, entries = plan_loss(
            traced, mesh, plain, batch, lambda layers: choose_overrides(overrides, layers)
        )
    except _OTHER_PARAMS as error:
        reason = str(error).split(" (http")[0]
        names = ", ".join(map(str, plain)) if isinstance(plain, Mapping) else type(plain).__name__
        raise UserError("params", names, f"the parameters of every layer that loss applies: {reason}") from None
    layouts = jax.tree.unflatten(jax.tree.structure(plain), leaves)
    sharded_params = jax.tree.map(lambda value, leaf: put(value, NamedSharding(mesh, leaf.spec)), plain, layouts)
    return LinenLoss(loss, mesh, plans, layouts, entries), sharded_params


_OTHER_PARAMS = (
    errors.ScopeParamNotFoundError,
    errors.ScopeParamShapeError,
    errors.ScopeCollectionNotFound,
    errors.ApplyScopeInvalidVariablesStructureError,
)
"""Errors that Flax raises for parameters that do not fit a module."""


def unboxed(params: Any) -> Any:
    """Return a tree of parameters without the axis names that its author gave them."""
    return jax.tree.map(_unboxed, params, is_leaf=meta.is_axis_metadata)


def _unboxed(leaf: Any) -> Any:
    if not meta.is_axis_metadata(leaf):
        return leaf
    # Unboxing would otherwise constrain the value to the layout that the author's axis names ask for.
    with linen.logical_axis_rules(()):
        return leaf.unbox(apply_constraint=False) if isinstance(leaf, meta.Partitioned) else leaf.unbox()


def _check(loss: Any, params: Any, batch: Any) -> None:
    if isinstance(loss, linen.Module | LinenLoss) or not callable(loss):
        raise UserError("loss", type(loss).__name__, "a function of (params, batch) that is not parallelized already")
    if not jax.tree.leaves(params) or not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(params)):
        raise UserError("params", type(params).__name__, "a tree of arrays, as module.init(...) returns it")
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, str | bytes) or getattr(getattr(leaf, "dtype", None), "kind", "") in ("O", "S", "U"):
            raise UserError("batch", f"{type(leaf).__name__} in it", "numbers in arrays")
    if not any(getattr(leaf, "shape", ())[:1] > (0,) for leaf in jax.tree.leaves(batch)):
        raise UserError("batch", jax.tree.map(jnp.shape, batch), "at least one array, with rows in its first dim")
