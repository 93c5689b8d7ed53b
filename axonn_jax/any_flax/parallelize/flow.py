"""Dataflow analyses of a traced program: activation layouts between layers, and origins of the layers' parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonn_jax.any_flax.parallelize.layouts import ActivationSplit
from axonn_jax.core.backend.jaxprs import bodies, follow, same_body, scan_sizes

MARK = "axonn_layer"
"""Prefix of the name of an equation that stands for one call of a layer."""

Shape = tuple[int, ...]


class Activation(NamedTuple):
    """Facts that the analysis has about an activation."""

    split: ActivationSplit | None = None
    trained: bool = False
    """True if it depends differentiably on a parameter."""


AtLayer = Callable[["Marked", int, Activation], ActivationSplit | None]
"""Returns the layout of a layer's output, given the call, the number of elements in its output, and its input."""


class Marked(NamedTuple):
    """Call of a layer, as encoded in its equation's name."""

    number: int
    entry: str
    shape: Shape
    """Shape of the input."""


def mark(call: Callable[..., Any], number: int, method: str, x: jax.Array) -> Callable[..., Any]:
    """Return a function that traces to a single equation, whose name encodes a layer's call.

    Args:
        call: The function to trace; its last argument is the layer's input.
        number: Index of the call.
        method: Name of the layer's method.
        x: Input of the layer, for its shape.
    """

    def layer(*args: Any) -> Any:
        return call(*args)

    # jax keeps the name of a jitted function in its equation, also in a derivative.
    layer.__name__ = f"{MARK}:{number}:{method}:{','.join(map(str, x.shape))}"
    return jax.jit(layer)


def marked(eqn: Any) -> Marked | None:
    """Return the layer's call for which an equation stands; None for any other equation."""
    first, *fields = str(eqn.params.get("name", "")).split(":")
    if first != MARK:
        return None
    number, method, sizes = fields
    return Marked(int(number), method, tuple(int(size) for size in sizes.split(",") if size))


def follow_layouts(jaxpr: Any, activations: list[Activation], at_layer: AtLayer) -> list[Activation]:
    """Propagate layouts from a jaxpr's inputs to its outputs.

    Args:
        jaxpr: The traced program.
        activations: What is known about each input.
        at_layer: Decides the layout of each layer's output.

    Returns:
        What is known about each output.
    """

    def through(eqn: Any, arrive: list[Activation]) -> list[Activation]:
        # Where two activations meet, as in a residual sum, the first known layout counts.
        split = next((activation.split for activation in arrive if activation.split is not None), None)
        trained = any(activation.trained for activation in arrive) and eqn.primitive.name != "stop_gradient"
        leave = [Activation(split, trained)] * len(eqn.outvars)
        layer, inner = marked(eqn), same_body(eqn)
        if layer is not None:
            if eqn.outvars:  # an equation without outputs is one whose result nothing uses
                out_size = math.prod(eqn.outvars[0].aval.shape)
                split = at_layer(layer, out_size, Activation(split, arrive[-1].trained))
                leave = [Activation(split, trained)] * len(eqn.outvars)
        elif inner is not None:
            leave = follow_layouts(inner, _scan_inputs(eqn, inner, arrive), at_layer)
        elif eqn.primitive.name == "cond":
            # The first operand is the predicate. All branches agree in shapes, so any one's layout will do.
            branches = [follow_layouts(branch, arrive[1:], at_layer) for branch in bodies(eqn)]
            leave = [Activation(outs[-1].split, any(a.trained for a in outs)) for outs in zip(*branches, strict=True)]
        pairs = zip(eqn.outvars, leave, strict=True)
        return [activation if _has_gradient(var) else Activation(activation.split) for var, activation in pairs]

    return follow(jaxpr, activations, Activation(), through)


def _has_gradient(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _scan_inputs(eqn: Any, inner: Any, arrive: list[Activation]) -> list[Activation]:
    """Return the body's inputs; an input counts as trained if any iteration trains it."""
    if eqn.primitive.name != "scan":
        return arrive
    first, count = scan_sizes(eqn, inner)
    # Iterate to a fixed point: `trained` only ever turns from False to True, so this ends.
    while True:
        leave = follow_layouts(inner, arrive, lambda call, out_size, x: x.split)
        carry = zip(arrive[first : first + count], leave[:count], strict=True)
        merged = [Activation(initial.split, initial.trained or final.trained) for initial, final in carry]
        if merged == arrive[first : first + count]:
            return arrive
        arrive = [*arrive[:first], *merged, *arrive[first + count :]]


@dataclass(frozen=True)
class Origin:
    """Input of a trace that a value was taken from element by element."""

    index: int
    """Index of the input."""
    dims: tuple[int | None, ...]
    """The input's dim behind each dim of the value; None where the size differs."""
    times: int = 1
    """Number of slices of the input that pass through here in turn."""


Origins = list[Origin | None]


def find_origins(jaxpr: Any, arrive: Origins, at: Callable[[Any, Origins], None]) -> Origins:
    """Propagate origins from a jaxpr's inputs to its outputs.

    Origins survive transposes, scans over a stack, indexing into a stack, and operations that keep a value's dims
    (casts, scaling).

    Args:
        jaxpr: The traced program.
        arrive: Origin of each input, or None.
        at: Called with each equation and the origins of its inputs.

    Returns:
        Origin of each output, or None.
    """

    def through(eqn: Any, inputs: Origins) -> Origins:
        at(eqn, inputs)
        inner = same_body(eqn)
        first = next(
            ((origin, var) for origin, var in zip(inputs, eqn.invars, strict=True) if origin is not None), None
        )
        if eqn.primitive.name == "scan" and inner is not None:
            count, length = sum(scan_sizes(eqn, inner)), eqn.params["length"]
            find_origins(inner, inputs[:count] + [_slice_origin(origin, length) for origin in inputs[count:]], at)
        elif eqn.primitive.name == "cond":
            for branch in bodies(eqn):
                find_origins(branch, inputs[1:], at)
        elif inner is not None:
            return find_origins(inner, inputs, at)
        elif first is not None:
            return [_through(eqn, *first, var.aval.shape) for var in eqn.outvars]
        return [None] * len(eqn.outvars)

    return follow(jaxpr, arrive, None, through)


def _slice_origin(origin: Origin | None, length: int) -> Origin | None:
    return None if origin is None else Origin(origin.index, origin.dims[1:], origin.times * length)


def _through(eqn: Any, origin: Origin, var: Any, shape: tuple[int, ...]) -> Origin | None:
    if eqn.primitive.name == "transpose":
        return replace(origin, dims=tuple(origin.dims[dim] for dim in eqn.params["permutation"]))
    if eqn.primitive.name == "squeeze":
        dropped = eqn.params["dimensions"]
        return replace(origin, dims=tuple(dim for at, dim in enumerate(origin.dims) if at not in dropped))
    if len(shape) != len(origin.dims):
        return None
    sizes = zip(origin.dims, var.aval.shape, shape, strict=True)
    return replace(origin, dims=tuple(dim if size_in == size_out else None for dim, size_in, size_out in sizes))


_PRODUCTS = ("dot_general", "conv_general_dilated", "gather", "ragged_dot_general")
_PARTS = ("slice", "dynamic_slice", "squeeze")


def inputs_of_products(jaxpr: Any, arrive: list[frozenset[int]], read: set[int]) -> list[frozenset[int]]:
    """Collect the inputs that a matmul-like operation outside layers and manual regions reads.

    Args:
        jaxpr: The traced program.
        arrive: Indices of the inputs from which each of the jaxpr's variables is computed.
        read: The set to which indices are added.

    Returns:
        Indices of the inputs from which each output is computed.
    """
    nothing = frozenset[int]()

    def through(eqn: Any, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
        every, inner, inside = nothing.union(*inputs), same_body(eqn), list(bodies(eqn))
        if not every or marked(eqn) is not None or eqn.primitive.name == "shard_map":
            return [nothing] * len(eqn.outvars)
        if eqn.primitive.name in _PRODUCTS:
            read.update(every)
            return [nothing] * len(eqn.outvars)
        if inner is not None:
            return inputs_of_products(inner, inputs, read)
        # Operands of branches and loops do not map one to one to the body's inputs: assume that each may be any.
        for body in inside:
            inputs_of_products(body, [every] * len(body.invars), read)
        if inside:
            return [every] * len(eqn.outvars)
        # A result smaller than an operand is a reduction of it, not the parameter itself, unless it is a slice.
        parts = eqn.primitive.name in _PARTS
        operands = [(used, var.aval.size) for used, var in zip(inputs, eqn.invars, strict=True)]
        return [
            nothing.union(*(used for used, size in operands if parts or size <= out.aval.size)) for out in eqn.outvars
        ]

    return follow(jaxpr, arrive, nothing, through)
