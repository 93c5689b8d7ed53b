"""Roles along the flow of data: the model is traced once, and each layer takes what really reaches it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from axonn_jax.tensor.wrap.choose import Chooser
from axonn_jax.tensor.wrap.convolution import check_grouped
from axonn_jax.tensor.wrap.plan import LayerPlan, Stream

_MARK = "axonn_layer"
_INDEX = "axonn_index"


def plans_by_flow(
    chooser: Chooser,
    model: nnx.Module,
    layers: dict[str, nnx.Module],
    overrides: dict[str, str],
    call: Callable[[Any], Any],
) -> dict[str, LayerPlan]:
    """A plan for each layer that `call(model)` reaches, with the sizes of its calls; nothing is computed.

    `model` (a copy: its layers become probes) is traced to a jaxpr in which every layer is one marked equation. An
    activation carries the axis that splits it through everything between two layers; where two meet (a residual
    sum, attention's products) the first that is known counts.
    """
    paths = list(layers)
    for index, layer in enumerate(layers.values()):
        setattr(layer, _INDEX, index)
        layer.__class__ = _probe(type(layer))
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda state: jax.tree.leaves(call(nnx.merge(graphdef, state))))(state).jaxpr
    check_grouped(jaxpr, chooser.mesh, _MARK)
    originals = list(layers.values())
    plans: dict[str, LayerPlan] = {}

    def at_layer(index: int, method: str, shape: Shape, out_size: int, arrives: Stream | None) -> Stream | None:
        path, layer = paths[index], originals[index]
        # As layers do: the first dim is the batch, and ids of one dim are positions.
        split = len(shape) > 1 and shape[0] % (chooser.mesh.shape["data"] * chooser.mesh.shape["z"]) == 0
        if path not in plans:
            plans[path] = chooser.plan(layer, arrives, overrides.get(path))
        plans[path] = plans[path].called_with(math.prod(shape), out_size, split=split)
        return chooser.leaves(layer, plans[path], arrives, method)

    for layer in originals:
        layer.__class__ = type(layer).__mro__[1]
    _follow(jaxpr, [None] * len(jaxpr.invars), at_layer)
    return plans


Shape = tuple[int, ...]
AtLayer = Callable[[int, str, Shape, int, Stream | None], Stream | None]


@functools.cache
def _probe(kind: type[nnx.Module]) -> type[nnx.Module]:
    """The layer type with each call traced as one equation that names the layer."""

    def marked(method: str) -> Callable[..., Any]:
        def call(self: Any, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
            def layer(x: jax.Array) -> Any:
                return getattr(kind, method)(self, x, *args, **kwargs)

            layer.__name__ = f"{_MARK}:{getattr(self, _INDEX)}:{method}:{','.join(map(str, x.shape))}"
            return jax.jit(layer)(x)

        return call

    methods = [name for name in ("__call__", "attend") if hasattr(kind, name)]
    return type(f"Probed{kind.__name__}", (kind,), {name: marked(name) for name in methods})


def _follow(jaxpr: Any, streams: list[Stream | None], at_layer: AtLayer) -> list[Stream | None]:
    """Carries streams through a jaxpr's equations, from its inputs to its outputs."""
    known: dict[Any, Stream | None] = dict(zip(jaxpr.invars, streams, strict=True))

    def of(var: Any) -> Stream | None:
        return None if hasattr(var, "val") else known.get(var)  # a literal has a value and is not hashable

    for eqn in jaxpr.eqns:
        arrive = [of(var) for var in eqn.invars]
        first = next((stream for stream in arrive if stream is not None), None)
        mark = str(eqn.params.get("name", "")).split(":")
        inner = _inner(eqn)
        if mark[0] == _MARK:
            out_size = math.prod(eqn.outvars[0].aval.shape)
            shape = tuple(int(size) for size in mark[3].split(",") if size)
            leave = [at_layer(int(mark[1]), mark[2], shape, out_size, first)] * len(eqn.outvars)
        elif inner is not None:
            leave = _follow(inner, arrive, at_layer)
        else:
            leave = [first] * len(eqn.outvars)
        known.update(zip(eqn.outvars, leave, strict=True))
    return [of(var) for var in jaxpr.outvars]


def _inner(eqn: Any) -> Any:
    """The jaxpr an equation runs (jit, remat, scan, a custom derivative), if it takes and gives the same values."""
    for param in eqn.params.values():
        inner = getattr(param, "jaxpr", param)
        if hasattr(inner, "eqns") and len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
            return inner
    return None
