"""Propagation of layouts: each layer's plan follows from its input's layout, in definition order or along the data."""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.convolution import check_grouped
from axonn_jax.any_flax.parallelize.flow import MARK, Activation, Marked, follow_layouts, mark
from axonn_jax.any_flax.parallelize.kinds import CALLS, Kernel, Norm, Side, base_of, describe, in_place_of_base
from axonn_jax.any_flax.parallelize.layouts import ActivationSplit, Call, LayerPlan, spec_of
from axonn_jax.core.ops.layers import TensorAxis
from axonn_jax.core.tensor.linear import swapped
from axonn_jax.core.tensor.specs import size_over


def plan_of(mesh: Mesh, layer: Any, arrives: ActivationSplit | None, override: str | None) -> LayerPlan:
    """Plan one layer.

    Args:
        mesh: The grid's mesh.
        layer: The NNX layer, or another module.
        arrives: Layout of the input; None if it is not split over `x` or `y`.
        override: "replicated", or the axis to contract over, "x" or "y" (for an embedding or a norm: the axis of its
            features); None to follow the input.
    """
    described = describe(layer)
    if isinstance(described, str):
        return LayerPlan(type(layer).__name__, mesh, False, note=described)
    # Even with replicated parameters, a layer with a kernel splits its rows in a manual region: XLA's partitioner
    # computes the kernel gradient of a grouped convolution wrong where rows are split over some devices and
    # replicated over others (jaxlib 0.10.2).
    kind, sides = base_of(type(layer)).__name__, tuple[Side, ...]()  # type: ignore[union-attr]
    if isinstance(described, Kernel):
        sides = (described.ins[0], described.outs[0])
    unsplit = LayerPlan(kind, mesh, isinstance(described, Kernel), of=described, sides=sides)
    if override == "replicated":
        return replace(unsplit, note="by an override")
    # Ids are never split over x or y, so an embedding starts a residual stream over x wherever it appears.
    axis: TensorAxis = "x" if arrives is None or isinstance(layer, nnx.Embed) else arrives.axis
    if override is not None:
        axis = "y" if override == "y" else "x"
    if isinstance(described, Norm) or described.groups > 1:
        return _grouped(unsplit, described, arrives, axis, forced=override is not None)
    if isinstance(layer, nnx.Embed):
        return _kernel(unsplit, described, swapped(axis), axis)
    plan = _kernel(unsplit, described, axis, swapped(axis))
    if arrives is not None and axis != arrives.axis:
        return replace(plan, note="; ".join(filter(None, (plan.note, f"its input arrives over {arrives.axis}"))))
    return plan


def _grouped(
    unsplit: LayerPlan, of: Kernel | Norm, arrives: ActivationSplit | None, axis: TensorAxis, *, forced: bool
) -> LayerPlan:
    """Plan a layer whose groups of features do not mix (in a norm, single features): complete groups on each device."""
    mesh, specs = unsplit.mesh, [(name, P(axis)) for name in of.names]
    size, groups, whose, noun = of.features[0], of.features[0], "it normalises", "features"
    if isinstance(of, Kernel):
        size, groups, whose, noun = of.ins[0].size, of.groups, "of its groups", "groups"
        specs = [(of.name, spec_of(len(of.shape), (of.outs[0].kernel, axis))), ("bias", P(axis))]
    if not forced and (arrives is None or not arrives.last or arrives.size != size):
        return replace(unsplit, note=f"the features {whose} are not split where it stands")
    if groups % mesh.shape[axis]:
        return replace(unsplit, note=_uneven(noun, groups, axis, mesh.shape[axis]))
    return replace(unsplit, sharded=True, in_axis=axis, out_axis=axis, specs=tuple(specs))


def _kernel(unsplit: LayerPlan, kernel: Kernel, in_axis: TensorAxis, out_axis: TensorAxis) -> LayerPlan:
    mesh, ends = unsplit.mesh, ("vocabulary", "features") if kernel.name == "embedding" else ("input", "output")
    side_in, note_in = _side(mesh, kernel.ins, in_axis, ends[0])
    side_out, note_out = _side(mesh, kernel.outs, out_axis, ends[1])
    split: dict[int, tuple[str, ...]] = {}
    if side_in is not None:
        split[side_in.kernel] = (in_axis,)
    if side_out is not None:
        split[side_out.kernel] = (out_axis,)
    # The 4D algorithm puts z on the contracted dim; fall back to the others only where that does not divide.
    order = [*split, *(side.kernel for side in (*kernel.ins, *kernel.outs)), *range(len(kernel.shape))]
    z, note_z = mesh.shape["z"], ""
    for dim in order:
        if kernel.shape[dim] % (z * size_over(mesh, split.get(dim, ()))) == 0:
            split[dim] = (*split.get(dim, ()), "z")
            break
    else:
        note_z = f"no dim of its weight {kernel.shape} divides by z = {z}"
    unsplit = replace(unsplit, note="; ".join(filter(None, (note_in, note_out, note_z))))
    if side_in is None and side_out is None:
        return unsplit
    specs: tuple[tuple[str, P], ...] = ((kernel.name, P(*(split.get(dim) for dim in range(len(kernel.shape))))),)
    if kernel.bias is not None:
        y = None if side_out is None else side_out.activation
        specs += (("bias", P(*(out_axis if dim == y else None for dim in kernel.bias))),)
    return replace(
        unsplit,
        in_axis=None if side_in is None else in_axis,
        out_axis=None if side_out is None else out_axis,
        specs=specs,
        sides=(side_in or kernel.ins[0], side_out or kernel.outs[0]),
    )


def _side(mesh: Mesh, sides: tuple[Side, ...], axis: TensorAxis, end: str) -> tuple[Side | None, str]:
    """Return the first candidate that the axis divides, or the reason why there is none."""
    parts = mesh.shape[axis]
    for side in sides:
        if side.size % parts == 0:
            return side, ""
    return None, _uneven(end, sides[0].size, axis, parts)


def _leaves(plan: LayerPlan, arrives: ActivationSplit | None, method: str = "__call__") -> ActivationSplit | None:
    """Return the layout of the layer's output, None if unsplit."""
    if not plan.sharded or not isinstance(plan.of, Kernel):
        return arrives
    if method == "attend":
        return None if plan.in_axis is None else ActivationSplit(plan.in_axis, plan.of.shape[0], True)
    if plan.out_axis is None:
        return None
    return ActivationSplit(plan.out_axis, plan.sides[1].size, plan.sides[1].activation == -1)


def _uneven(noun: str, size: int, axis: str, parts: int) -> str:
    return f"{noun} {size} does not divide by {axis} = {parts}"


_BRANCHES = (
    frozenset({"q", "k", "v"}),
    frozenset({"wq", "wk", "wv"}),
    frozenset({"query", "key", "value"}),
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate", "up"}),
    frozenset({"gate_proj", "up_proj"}),
)
"""Names of sibling layers that share an input."""


def _side_by_side(first: str, second: str) -> bool:
    (parent, _, name), (parent_2, _, name_2) = first.rpartition("."), second.rpartition(".")
    return parent == parent_2 and any(name in names and name_2 in names for names in _BRANCHES)


def plans_by_order(
    mesh: Mesh, layers: Iterable[tuple[str, Any]], overrides: dict[str, str], fixed: dict[str, LayerPlan]
) -> dict[str, LayerPlan]:
    """Plan each layer in turn, as if its input were the previous layer's output.

    The first layer's input is not split. Siblings with the names of branches, such as query, key and value, share the
    input of the first of them.

    Args:
        mesh: The grid's mesh.
        layers: Path and layer, in definition order.
        overrides: Overrides by path.
        fixed: Plans by path that are kept as they are.
    """
    plans: dict[str, LayerPlan] = {}
    split: ActivationSplit | None = None
    previous = ("", split)
    for path, layer in layers:
        arrives = previous[1] if previous[0] and _side_by_side(previous[0], path) else split
        plan = fixed.get(path) or plan_of(mesh, layer, arrives, overrides.get(path))
        plans[path] = plan
        # An unsharded layer leaves the alternation of x and y to the layers around it.
        if plan.sharded:
            previous = (path, arrives)
            split = _leaves(plan, arrives)
    return plans


_INDEX = "axonn_index"
Key = TypeVar("Key", bound=Hashable)


def plans_by_flow(
    mesh: Mesh,
    model: nnx.Module,
    layers: dict[str, nnx.Module],
    overrides: dict[str, str],
    call: Callable[[Any], Any],
) -> dict[str, LayerPlan]:
    """Plan each layer that `call(model)` reaches, with the sizes of its calls; nothing is computed.

    The model is traced to a jaxpr with one marked equation per call of a layer. An activation carries its axis through
    everything between two layers; where two activations meet (a residual sum, attention's products), the first known
    axis counts.

    Args:
        mesh: The grid's mesh.
        model: A copy of the model; its layers become probes during the trace.
        layers: The copy's layers by path.
        overrides: Overrides by path.
        call: A call of the model.
    """
    kinds = [type(layer) for layer in layers.values()]
    for index, layer in enumerate(layers.values()):
        setattr(layer, _INDEX, index)
        layer.__class__ = _probe(type(layer))
    graphdef, state = nnx.split(model)
    params, other_state = nnx.split_state(state, nnx.Param, ...)
    jaxpr = jax.make_jaxpr(lambda *state: jax.tree.leaves(call(nnx.merge(graphdef, *state))))(params, other_state).jaxpr
    check_grouped(jaxpr, mesh, MARK)
    for layer, kind in zip(layers.values(), kinds, strict=True):
        layer.__class__ = kind
    trained = [True] * len(jax.tree.leaves(params))
    return plans_of_calls(mesh, jaxpr, trained, list(layers.items()), overrides)


def plans_of_calls(
    mesh: Mesh,
    jaxpr: Any,
    trained: Sequence[bool],
    calls: Sequence[tuple[Key, Any]],
    overrides: Mapping[Key, str],
    times: Sequence[int] = (),
) -> dict[Key, LayerPlan]:
    """Plan each layer that has a marked equation in a jaxpr, with the sizes of its calls.

    Args:
        mesh: The grid's mesh.
        jaxpr: The traced program.
        trained: For each of the first inputs, whether it is a parameter with a gradient.
        calls: Key and layer of each marked equation, by its number.
        overrides: Overrides by key.
        times: Number of times each marked equation runs; by default the number of a stack's entries.
    """
    plans: dict[Key, LayerPlan] = {}

    def at_layer(call: Marked, out_size: int, x: Activation) -> ActivationSplit | None:
        key, layer = calls[call.number]
        plan = plans[key] if key in plans else plan_of(mesh, layer, x.split, overrides.get(key))
        # Rows are the first dim, except for ids of one dim, which are positions. A stack's entries share one equation.
        rows = call.shape[0] if len(call.shape) > 1 else 1
        runs = times[call.number] if times else math.prod(plan.stack)
        sizes = Call(runs * math.prod(call.shape), runs * out_size, rows, x.trained, call.entry == "attend")
        plans[key] = replace(plan, calls=(*(plan.calls or ()), sizes))
        return _leaves(plan, x.split, call.entry)

    untrained = [Activation()] * (len(jaxpr.invars) - len(trained))
    follow_layouts(jaxpr, [*(Activation(None, has_grad) for has_grad in trained), *untrained], at_layer)
    return plans


@functools.cache
def _probe(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return the layer type in which every call of the Flax layer traces to one equation named after it."""
    base = base_of(kind)
    assert base is not None

    def marked(method: str) -> Callable[..., Any]:
        def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
            def layer(x: jax.Array) -> Any:
                return getattr(base, method)(self, x, *args, **kwargs)

            return mark(layer, getattr(self, _INDEX), method, x)(x)

        return call

    methods = {name: marked(name) for name in CALLS if hasattr(base, name)}
    return in_place_of_base(kind, type(f"Probed{base.__name__}", (base,), methods), "Probed")
