"""Plans for a Linen model's layers and layouts for its parameters, from a single trace of its loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.convolution import check_grouped
from axonn_jax.any_flax.parallelize.flow import MARK, Origin, Origins, find_origins, inputs_of_products, mark, marked
from axonn_jax.any_flax.parallelize.layouts import REPLICATED, LayerPlan, Stored, further_layouts, spec_of
from axonn_jax.any_flax.parallelize.linen_layers import LayerCall, MethodCall, intercepted
from axonn_jax.any_flax.parallelize.propagate import plan_of, plans_of_calls
from axonn_jax.any_flax.parallelize.transfers import Entry
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.tensor.specs import spec_axes

Key = tuple[Any, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TreeLeaf:
    """One leaf of the parameter tree, with its layouts."""

    owner: str
    """Dotted path of the module, without the parameter's name."""
    param: str
    array: Any
    trained: bool
    """False for state: collections next to ``params``, such as `batch_stats`."""
    used: P = REPLICATED
    """Layout in which the layer computes with it."""
    spec: P = REPLICATED
    """Layout in which it is stored, possibly split over more axes than `used`."""
    in_layer: bool = False
    """True if it belongs to a planned layer."""
    shared: bool = False
    """True if it is split over `z` for a layer and a product outside any layer reads it as well."""


@dataclass(frozen=True)
class Use:
    """One call of a layer in the trace."""

    call: LayerCall
    layer: Any
    """The NNX layer, with traced parameters."""
    origins: dict[str, Origin | None] = field(default_factory=dict)
    """Leaf of the tree from which each parameter of the layer comes, as a whole or as a slice."""

    @property
    def times(self) -> int:
        """Number of times this call runs; in a scan over stacked parameters once per slice."""
        return max((origin.times for origin in self.origins.values() if origin is not None), default=1)

    @property
    def leaf(self) -> int | None:
        """Index of the leaf behind the first parameter that comes from one; None if none does."""
        return next((origin.index for origin in self.origins.values() if origin is not None), None)


@dataclass(eq=False)
class Trace:
    """Record of a loss's trace, in which each call of a splittable layer is one marked equation."""

    mesh: Mesh
    uses: list[Use] = field(default_factory=list)
    unsplit: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    """Type of every other module and the reason why it is not split, by path."""

    def run(self, call: MethodCall) -> Any:
        """Run a method call; a splittable layer's call is traced as one marked equation."""
        reason = call.layer
        if isinstance(reason, LayerCall):
            described = reason.described()
            if not isinstance(described, str):
                return self._mark(reason)
            reason = described
        if call.module.scope is not None and (reason or call.module.path not in self.unsplit):
            self.unsplit[call.module.path] = (type(call.module).__name__, reason)
        return call.by_rows(self.mesh, BATCH_AXES)

    def _mark(self, call: LayerCall) -> Any:
        def layer(params: dict[str, Any], x: Any) -> Any:
            traced_call = replace(call, x=x, params=params)
            return traced_call.run(traced_call.layer)

        self.uses.append(Use(call, call.layer))
        return mark(layer, len(self.uses) - 1, call.entry, call.x)(call.params, call.x)

    def entry(self, leaf: TreeLeaf, use: Use | None, plans: Mapping[Key, LayerPlan]) -> Entry:
        """Return the report entry, still without parameters, of the layer or module that owns a leaf."""
        path = leaf.owner or "(model)"
        if use is not None:
            dtype = use.call.module.param_dtype if use.call.dtype is None else use.call.dtype
            return Entry(path, plans[use.call.key], {}, dtype)
        # A module's path is relative to its root module, so it matches the end of the leaf's path; the longest wins.
        owners = [at for at in self.unsplit if not at or f".{leaf.owner}".endswith(f".{'.'.join(at)}")]
        kind, reason = self.unsplit.get(max(owners, key=len, default=("",)), ("-", "no Linen module holds them"))
        plan = LayerPlan(kind, self.mesh, False, note=reason or f"a {kind} has no sharded form")
        return Entry(path, plan, {}, leaf.array.dtype)

    def at(self, eqn: Any, origins: Origins) -> None:
        """Record where a marked equation's parameters come from; reject a sharding constraint on another mesh."""
        call = marked(eqn)
        if call is not None:
            use = self.uses[call.number]
            names = sorted(use.call.params)  # the order in which jax flattens a dict
            # A derivative of the call keeps its name but has more operands; only the call itself tells the origins.
            if len(origins) == 1 + len(names) and not use.origins:
                use.origins.update(zip(names, origins[:-1], strict=True))
        mesh = getattr(eqn.params.get("sharding"), "mesh", None)
        if mesh is not None and mesh.shape_tuple != self.mesh.shape_tuple:
            raise UserError(
                "loss", f"a sharding constraint {eqn.params['sharding'].spec} on a mesh of {dict(mesh.shape)}",
                f"none, or one on the grid's mesh, of {', '.join(self.mesh.axis_names)}",
            )  # fmt: skip


def plan_loss(
    loss: Callable[[Any, Any], Any],
    mesh: Mesh,
    params: Any,
    batch: Any,
    choose: Callable[[Mapping[str, Any]], Mapping[str, str]],
) -> tuple[dict[Key, LayerPlan], list[TreeLeaf], tuple[Entry, ...]]:
    """Plan the layers of a loss from a single trace; nothing is computed.

    Args:
        loss: The loss, traced on `params` and `batch`.
        mesh: The grid's mesh.
        params: The tree of parameters, arrays or shapes.
        batch: A batch, arrays or shapes.
        choose: Maps all layers by path to the overrides of some of them by path.

    Returns:
        The plans by `LayerCall.key`, the leaves of `params` with their layouts, and the entries of the report.

    Raises:
        UserError: The loss returns no scalar, constrains a value to another mesh, or contains a grouped convolution
            whose gradient XLA computes wrong.
    """
    trace = Trace(mesh)
    with intercepted(object(), trace.run):
        closed, result = jax.make_jaxpr(loss, return_shape=True)(params, batch)
    _check_scalar(result)
    jaxpr = closed.jaxpr
    check_grouped(jaxpr, mesh, MARK)
    leaves = _leaves(params)
    origins: Origins = [Origin(index, tuple(range(leaf.array.ndim))) for index, leaf in enumerate(leaves)]
    find_origins(jaxpr, origins + [None] * (len(jaxpr.invars) - len(leaves)), trace.at)
    uses = _by_path(trace.uses, leaves)
    layer_overrides = choose(uses)
    overrides = {use.call.key: layer_overrides[path] for path, use in uses.items() if path in layer_overrides}
    plans = _plans(mesh, jaxpr, [leaf.trained for leaf in leaves], trace.uses, overrides)
    leaves = _with_layouts(leaves, jaxpr, _layouts(trace.uses, plans, leaves), layer_overrides, mesh)
    entries: dict[str, Entry] = {}
    for leaf in leaves:
        entry = entries.setdefault(leaf.owner, trace.entry(leaf, uses.get(leaf.owner), plans))
        if leaf.spec != leaf.used:
            plan = replace(entry.plan, spread=(*entry.plan.spread, (leaf.param, leaf.spec)))
            entry = replace(entry, plan=plan)
        abstract = jax.ShapeDtypeStruct(leaf.array.shape, leaf.array.dtype, sharding=NamedSharding(mesh, leaf.spec))
        entries[leaf.owner] = replace(entry, params={**entry.params, leaf.param: abstract})
    return plans, leaves, tuple(entries.values())


def _leaves(params: Any) -> list[TreeLeaf]:
    collections = isinstance(params, Mapping) and "params" in params
    leaves = []
    for path, array in tree_util.tree_leaves_with_path(params):
        owner, _, param = tree_util.keystr(path, simple=True, separator=".").rpartition(".")
        leaves.append(TreeLeaf(owner, param, array, not collections or path[0] == tree_util.DictKey("params")))
    return leaves


def _by_path(uses: Sequence[Use], leaves: Sequence[TreeLeaf]) -> dict[str, Use]:
    """Return each layer's first use by its path in the tree, or in its module if it has no parameter from the tree."""
    by_path: dict[str, Use] = {}
    for use in uses:
        if use.leaf is not None:
            by_path.setdefault(leaves[use.leaf].owner, use)
    keys = {use.call.key for use in by_path.values()}
    by_module = {".".join(use.call.module.path): use for use in uses if use.call.key not in keys}
    return by_module | by_path


def _check_scalar(result: Any) -> None:
    value = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        returned = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", result)
        raise UserError("loss", f"a function that returns {returned}", "one that returns a scalar, or (scalar, aux)")


def _plans(
    mesh: Mesh, jaxpr: Any, trained: Sequence[bool], uses: Sequence[Use], overrides: Mapping[Key, str]
) -> dict[Key, LayerPlan]:
    # Some layers are never reached by the flow of activations: plan those as if their input were not split.
    calls = [(use.call.key, use.layer) for use in uses]
    plans = plans_of_calls(mesh, jaxpr, trained, calls, overrides, [use.times for use in uses])
    unreached = {key: plan_of(mesh, layer, None, overrides.get(key)) for key, layer in calls if key not in plans}
    return {use.call.key: replace((plans | unreached)[use.call.key], kind=use.call.base.__name__) for use in uses}


def _layouts(
    uses: Sequence[Use], plans: Mapping[Key, LayerPlan], leaves: Sequence[TreeLeaf]
) -> dict[int, tuple[P, int]]:
    """Return each sharded layer's leaf layouts, and the first dim after the stacked ones.

    A leaf that several layers share takes the layout of the first.
    """
    layouts: dict[int, tuple[P, int]] = {}
    for use in uses:
        plan = plans[use.call.key]
        for name, origin in use.origins.items():
            if plan.sharded and origin is not None and origin.index not in layouts:
                stacked = leaves[origin.index].array.shape
                dims = _dims(origin, stacked, use.call.params[name].shape)
                split = ((dim, axes) for dim, axes in zip(dims, plan.spec(name), strict=False) if dim is not None)
                first = 1 + max((dim for dim in range(len(stacked)) if dim not in dims), default=-1)
                layouts[origin.index] = (spec_of(len(stacked), *split), first)
    return layouts


def _with_layouts(
    leaves: Sequence[TreeLeaf],
    jaxpr: Any,
    layer_layouts: Mapping[int, tuple[P, int]],
    overrides: Mapping[str, str],
    mesh: Mesh,
) -> list[TreeLeaf]:
    stored = {}
    for index, leaf in enumerate(leaves):
        free = leaf.trained and overrides.get(leaf.owner) != "replicated"
        size = leaf.array.size * leaf.array.dtype.itemsize
        stored[index] = Stored(leaf.array.shape, size, *layer_layouts.get(index, (P(), 0)), free)
    further = further_layouts({index: param for index, param in stored.items() if leaves[index].trained}, mesh)
    read: set[int] = set()
    sources = [frozenset((index,)) if index < len(leaves) else frozenset() for index in range(len(jaxpr.invars))]
    inputs_of_products(jaxpr, sources, read)
    planned = []
    for index, leaf in enumerate(leaves):
        spec, in_layer = further.get(index, stored[index].used), index in layer_layouts
        shared = in_layer and index in read and "z" in spec_axes(spec)
        planned.append(replace(leaf, used=stored[index].used, spec=spec, in_layer=in_layer, shared=shared))
    return planned


def _dims(origin: Origin, stacked: Shape, shape: Shape) -> tuple[int | None, ...]:
    """Return the leaf's dim for each dim of a layer's parameter; None where it is unknown.

    Under `nn.vmap` the leaf has more dims than the layer sees: the leading ones that do not fit are dropped.
    """
    # Reversed, so that the last dims are tried first and a leading mapped dim is the one dropped.
    for dims in reversed(list(combinations(origin.dims, len(shape)))):
        if all(dim is None or stacked[dim] == size for dim, size in zip(dims, shape, strict=True)):
            return dims
    return (None,) * len(shape)
