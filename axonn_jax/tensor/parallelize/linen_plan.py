"""Plans of a Linen model's layers, and its parameters' layouts, from one trace of its loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.tensor.parallelize.convolution import check_grouped
from axonn_jax.tensor.parallelize.kinds import describe
from axonn_jax.tensor.parallelize.layouts import ActivationSplit, LayerPlan, spec_of
from axonn_jax.tensor.parallelize.linen_layers import LayerCall, MethodCall, intercepted
from axonn_jax.tensor.parallelize.origins import Origin, Origins, find_origins
from axonn_jax.tensor.parallelize.propagate import _MARK, Chooser, _follow

Key = tuple[Any, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """Call of a layer in the trace."""

    key: Key
    kind: str
    """Name of Linen's type."""
    layer: Any
    """The NNX layer, with traced parameters."""
    shapes: dict[str, Shape]
    """Of its parameters, in the order of their names."""
    dtype: Any
    """Of the computation."""
    origins: dict[str, Origin | None] = field(default_factory=dict)
    """The parameter of the tree that each of them is, or is a part of."""

    @property
    def times(self) -> int:
        """Runs of this call, in a scan over stacked parameters one a part."""
        return max((origin.times for origin in self.origins.values() if origin is not None), default=1)

    def path(self, names: Sequence[str]) -> str:
        """The layer's path in a tree of parameters of these names; without any of them, its path in its module."""
        origin = next((each for each in self.origins.values() if each is not None), None)
        return ".".join(self.key[0]) if origin is None else names[origin.index].rpartition(".")[0]


@dataclass(eq=False)
class Trace:
    """Trace of a loss, with a marked equation for each call of a layer that can be split."""

    mesh: Mesh
    uses: list[Use] = field(default_factory=list)
    whole: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    """Type of every other module with parameters, and the reason against splitting, by path."""

    def run(self, call: MethodCall) -> Any:
        """Call the method, as one equation if it is a layer's."""
        reason = call.reason
        if call.layer is not None:
            described = describe(call.layer.layer)
            if not isinstance(described, str):
                return self._mark(call.layer)
            reason = described
        if call.module.scope is not None and (reason or call.module.path not in self.whole):
            self.whole[call.module.path] = (type(call.module).__name__, reason)
        return call.plain()

    def _mark(self, call: LayerCall) -> Any:
        def layer(x: Any, held: dict[str, Any]) -> Any:
            again = replace(call, x=x, held=held)
            return again.run(again.layer)

        shapes = {name: call.held[name].shape for name in sorted(call.held)}  # as jax flattens them
        layer.__name__ = f"{_MARK}:{len(self.uses)}:{call.method}:{','.join(map(str, call.x.shape))}"
        dtype = call.module.param_dtype if call.dtype is None else call.dtype
        self.uses.append(Use(call.key, call.base.__name__, call.layer, shapes, dtype))
        return jax.jit(layer)(call.x, call.held)

    def unsplit(self, path: str) -> LayerPlan:
        """Return the plan of a module, by its path in the tree of parameters, that is no layer of the trace."""
        owners = [at for at in self.whole if not at or path.endswith(".".join(at))]
        kind, reason = self.whole.get(max(owners, key=len, default=("",)), ("-", ""))
        return LayerPlan(kind, self.mesh, False, note=reason or "no layer with a sharded form uses these parameters")

    def at(self, eqn: Any, origins: Origins) -> None:
        """Note the origins of a marked equation's parameters; refuse a layout on another mesh."""
        mark = str(eqn.params.get("name", "")).split(":")
        if mark[0] == _MARK:
            use = self.uses[int(mark[1])]
            if len(origins) == 1 + len(use.shapes) and not use.origins:  # more of them in a derivative
                use.origins.update(zip(use.shapes, origins[1:], strict=True))
        mesh = getattr(eqn.params.get("sharding"), "mesh", None)
        if (
            eqn.primitive.name == "sharding_constraint"
            and mesh is not None
            and mesh.shape_tuple != self.mesh.shape_tuple
        ):
            raise UserError(
                "loss", f"a sharding constraint {eqn.params['sharding'].spec} on a mesh of {dict(mesh.shape)}",
                f"none, or one on the grid's mesh, of {', '.join(self.mesh.axis_names)}",
            )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Layer, or another module with parameters, as a report lists it."""

    path: str
    plan: LayerPlan
    params: dict[str, Any]
    """Parameters by name: arrays, or shapes with a layout."""
    dtype: Any
    """Of the computation."""


@dataclass(frozen=True)
class LossPlan:
    """Plans of a loss's layers by `LayerCall.key`, and layouts of its parameters."""

    plans: dict[Key, LayerPlan]
    specs: list[P]
    """The layout of each leaf of the parameters."""
    in_layers: list[bool]
    """True for each leaf that a planned layer holds."""
    parts: tuple[Part, ...]


def plan_loss(
    loss: Callable[[Any, Any], Any],
    mesh: Mesh,
    params: Any,
    batch: Any,
    choose: Callable[[Mapping[str, Any]], Mapping[str, str]],
) -> LossPlan:
    """Plan the layers of a loss from one trace of it; nothing is computed.

    `choose` returns the overrides of layers by path, from all layers by path.
    """
    trace = Trace(mesh)
    with intercepted(object(), trace.run):
        closed, result = jax.make_jaxpr(loss, return_shape=True)(params, batch)
    _check_scalar(result)
    jaxpr = closed.jaxpr
    check_grouped(jaxpr, mesh, _MARK)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    names, arrays = list(leaves), list(leaves.values())
    origins: Origins = [Origin(index, tuple(range(leaf.ndim))) for index, leaf in enumerate(arrays)]
    find_origins(jaxpr, origins + [None] * (len(jaxpr.invars) - len(leaves)), trace.at)
    uses = {use.path(names): use for use in reversed(trace.uses)}
    chosen = choose({path: use.layer for path, use in uses.items()})
    plans = _plans(Chooser(mesh), jaxpr, trace.uses, {use.key: chosen.get(path) for path, use in uses.items()})
    held = _layouts(trace.uses, plans, arrays)
    specs = [held.get(index, P()) for index in range(len(leaves))]
    parts: dict[str, Part] = {}
    for (name, leaf), spec in zip(leaves.items(), specs, strict=True):
        path, _, param = name.rpartition(".")
        plan, dtype = trace.unsplit(path), leaf.dtype
        if path in uses:
            plan, dtype = plans[uses[path].key], uses[path].dtype
        laid = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        parts.setdefault(path, Part(path, plan, {}, dtype)).params[param] = laid
    return LossPlan(plans, specs, [index in held for index in range(len(leaves))], tuple(parts.values()))


def _check_scalar(result: Any) -> None:
    value = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        given = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", result)
        raise UserError("loss", f"a function that returns {given}", "one that returns a scalar, or (scalar, aux)")


def _plans(
    chooser: Chooser, jaxpr: Any, uses: Sequence[Use], overrides: Mapping[Key, str | None]
) -> dict[Key, LayerPlan]:
    plans: dict[Key, LayerPlan] = {}

    def plan(use: Use, arrives: ActivationSplit | None) -> LayerPlan:
        return replace(chooser.plan(use.layer, arrives, overrides.get(use.key)), kind=use.kind)

    def at_layer(
        index: int, method: str, shape: Shape, out_size: int, arrives: ActivationSplit | None
    ) -> ActivationSplit | None:
        use = uses[index]
        before = plans.get(use.key) or plan(use, arrives)
        rows = shape[0] if len(shape) > 1 else 1
        plans[use.key] = before.called_with(use.times * math.prod(shape), use.times * out_size, rows)
        return chooser.leaves(use.layer, before, arrives, method)

    _follow(jaxpr, [None] * len(jaxpr.invars), at_layer)
    return {use.key: plans.get(use.key) or plan(use, None) for use in uses}


def _layouts(uses: Sequence[Use], plans: Mapping[Key, LayerPlan], leaves: Sequence[Any]) -> dict[int, P]:
    """The layout of each leaf of a sharded layer, as the first layer that uses it has it."""
    specs: dict[int, P] = {}
    for use in uses:
        plan = plans[use.key]
        for name, origin in use.origins.items():
            if plan.sharded and origin is not None and origin.index not in specs:
                whole = leaves[origin.index].shape
                split = zip(_dims(origin, whole, use.shapes[name]), plan.spec(name), strict=False)
                specs[origin.index] = spec_of(len(whole), *((dim, axes) for dim, axes in split if dim is not None))
    return specs


def _dims(origin: Origin, whole: Shape, shape: Shape) -> tuple[int | None, ...]:
    """The leaf's dim for each dim of a layer's parameter.

    What is mapped over (`nn.vmap`) has a dim more than the layer sees: the first one that leaves a layer's shape.
    """
    for dims in reversed(list(combinations(origin.dims, len(shape)))):
        if all(dim is None or whole[dim] == size for dim, size in zip(dims, shape, strict=True)):
            return dims
    return (None,) * len(shape)
