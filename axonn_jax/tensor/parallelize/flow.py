"""Flow through a traced program: activations' layouts from layer to layer, parameters to the layers that use them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axonn_jax.backend.jaxprs import bodies, follow, same_body, scan_sizes
from axonn_jax.tensor.parallelize.layouts import ActivationSplit

MARK = "axonn_layer"
"""Beginning of the name of an equation that is one call of a layer."""

Shape = tuple[int, ...]


class Activation(NamedTuple):
    """Knowledge of an activation."""

    split: ActivationSplit | None = None
    trained: bool = False
    """True if it depends on a parameter in a way that has a gradient."""


AtLayer = Callable[["Marked", int, Activation], ActivationSplit | None]
"""The layout that leaves a layer: for its call, the size of its output, and the input."""


class Marked(NamedTuple):
    """Call of a layer."""

    number: int
    entry: str
    shape: Shape
    """The input's."""


def mark(call: Callable[..., Any], number: int, method: str, x: jax.Array) -> Callable[..., Any]:
    """Return a function that is traced as one equation, named after the call of a layer on `x`, its last argument."""

    def layer(*args: Any) -> Any:
        return call(*args)

    layer.__name__ = f"{MARK}:{number}:{method}:{','.join(map(str, x.shape))}"
    return jax.jit(layer)


def marked(eqn: Any) -> Marked | None:
    """Return the call of a layer that an equation is."""
    first, *fields = str(eqn.params.get("name", "")).split(":")
    if first != MARK:
        return None
    number, method, sizes = fields
    return Marked(int(number), method, tuple(int(size) for size in sizes.split(",") if size))


def follow_layouts(jaxpr: Any, activations: list[Activation], at_layer: AtLayer) -> list[Activation]:
    """Carry layouts through a jaxpr's equations, from inputs to outputs."""

    def through(eqn: Any, arrive: list[Activation]) -> list[Activation]:
        split = next((activation.split for activation in arrive if activation.split is not None), None)
        trained = any(activation.trained for activation in arrive) and eqn.primitive.name != "stop_gradient"
        leave = [Activation(split, trained)] * len(eqn.outvars)
        layer, inner = marked(eqn), same_body(eqn)
        if layer is not None:
            if eqn.outvars:  # else nothing uses the result
                out_size = math.prod(eqn.outvars[0].aval.shape)
                split = at_layer(layer, out_size, Activation(split, arrive[-1].trained))
                leave = [Activation(split, trained)] * len(eqn.outvars)
        elif inner is not None:
            leave = follow_layouts(inner, _scan_inputs(eqn, inner, arrive), at_layer)
        elif eqn.primitive.name == "cond":  # branches give values of one shape
            branches = [follow_layouts(branch, arrive[1:], at_layer) for branch in bodies(eqn)]
            leave = [Activation(outs[-1].split, any(a.trained for a in outs)) for outs in zip(*branches, strict=True)]
        pairs = zip(eqn.outvars, leave, strict=True)
        return [activation if _has_gradient(var) else Activation(activation.split) for var, activation in pairs]

    return follow(jaxpr, activations, Activation(), through)


def _has_gradient(var: Any) -> bool:
    return hasattr(var.aval, "dtype") and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _scan_inputs(eqn: Any, inner: Any, arrive: list[Activation]) -> list[Activation]:
    """The inputs of a scan's body in any of its runs: trained if they are so in one."""
    if eqn.primitive.name != "scan":
        return arrive
    first, count = scan_sizes(eqn, inner)
    while True:
        leave = follow_layouts(inner, arrive, lambda call, out_size, x: x.split)
        carry = zip(arrive[first : first + count], leave[:count], strict=True)
        merged = [Activation(initial.split, initial.trained or final.trained) for initial, final in carry]
        if merged == arrive[first : first + count]:
            return arrive
        arrive = [*arrive[:first], *merged, *arrive[first + count :]]


@dataclass(frozen=True)
class Origin:
    """Input of a trace from which a value came, element by element."""

    index: int
    """Number of the input."""
    dims: tuple[int | None, ...]
    """For each dim of the value the input's dim; None for a dim of another size."""
    times: int = 1
    """Parts of the input that come by here, one after the other."""


Origins = list[Origin | None]


def find_origins(jaxpr: Any, arrive: Origins, at: Callable[[Any, Origins], None]) -> Origins:
    """Carry origins through a jaxpr's equations, show each equation with its inputs' ones to `at`, return the results'.

    Followed are transposes, a scan over a stack, indexing into one, and what keeps a value's dims (casts, scaling).
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
    """The origin of a slice along the first dim."""
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
    """Add to `read` the inputs of which a product outside of layers and manual regions takes an operand.

    `arrive` has for each variable the inputs that it is made of, the result for each output.
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
        for body in inside:  # branches, or a loop
            inputs_of_products(body, [every] * len(body.invars), read)
        if inside:
            return [every] * len(eqn.outvars)
        # A result that is smaller, but for a part, is a sum or the like.
        parts = eqn.primitive.name in _PARTS
        operands = [(used, var.aval.size) for used, var in zip(inputs, eqn.invars, strict=True)]
        return [
            nothing.union(*(used for used, size in operands if parts or size <= out.aval.size)) for out in eqn.outvars
        ]

    return follow(jaxpr, arrive, nothing, through)
