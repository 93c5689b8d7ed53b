"""Layers that are alike as one layer whose parameters have a leading dim: one compiled body runs them all.

A layer's own parameters, such as `blocks.3.attention.qkv.kernel`, are what users, checkpoints and optimizers see.
Stacked, the kernels of all blocks are `blocks.every.attention.qkv.kernel`, [blocks, ...]; the new dim is never sharded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.tensor.params import Params, Parts, take_apart

Carry = TypeVar("Carry")


class Stacked(nnx.Module):
    """`count` layers in a row as `every`, a layer of which each parameter is [count, ...].

    Parameters keep the layout that one layer declares, which is how `every` is used: a layer at a time.
    """

    def __init__(self, every: nnx.Module, count: int):
        self.every, self.count = every, count

    def run(self, body: Callable[[Any, Carry, jax.Array], Carry], carry: Carry) -> Carry:
        """Calls body(layer, carry, index) for the layers in order, by `lax.scan`, and gives the last carry.

        Traced and compiled once, whatever the count. The carry keeps its shapes, dtypes and varying axes.
        """
        split: Any = nnx.split(self.every, nnx.Param, ...)
        graphdef, params, rest = split

        def step(carry: Carry, one: tuple[jax.Array, Any]) -> tuple[Carry, None]:
            index, params = one
            return body(nnx.merge(graphdef, params, rest), carry, index), None

        carry, _ = lax.scan(step, carry, (jnp.arange(self.count, dtype=jnp.uint32), params))
        return carry


@dataclass(frozen=True)
class Stack:
    """A model's parts as its programs hold them, and the layers' own names of what is stacked."""

    parts: Parts
    """Names, layouts and the way back to a module; where layers are stacked, parameters are shapes alone."""
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The layers' names, first to last, of every stacked parameter; none where nothing is stacked."""

    def join(self, params: Mapping[str, jax.Array], mesh: Mesh, *, used_up: bool = False) -> Params:
        """Parameters on the mesh under the layers' own names -> stacked; no collectives.

        With `used_up` the layers' arrays are deleted kind by kind, so that both forms of only one kind take memory.
        """
        joined: Params = {}
        for name, spec in self.parts.specs.items():
            if name not in self.own:
                joined[name] = params[name]
                continue
            layers = [params[layer] for layer in self.own[name]]
            joined[name] = join_layers(layers, NamedSharding(mesh, spec), used_up=used_up)
        return joined

    def place(self, model: nnx.Module, mesh: Mesh, *, used_up: bool = False) -> Params:
        """A model's parameters, laid out on the mesh and stacked; `used_up` as for `join`."""
        made = take_apart(model)
        shardings = {name: NamedSharding(mesh, spec) for name, spec in made.specs.items()}
        return self.join(jax.device_put(made.params, shardings), mesh, used_up=used_up)

    def shapes(self) -> Any:
        """Shapes of all parameters, of layers under their own names."""
        shapes: dict[str, jax.ShapeDtypeStruct] = {}
        for name, p in self.parts.params.items():
            names, dims = (self.own[name], p.shape[1:]) if name in self.own else ((name,), p.shape)
            shapes.update((own, jax.ShapeDtypeStruct(dims, p.dtype)) for own in names)
        return shapes


def stack_layers(model: nnx.Module) -> Stack:
    """The model with the layers of its attribute `repeats` (a list of layers that it runs in a row) stacked.

    Raises ``UserError`` where it names none, or they are fewer than two or not alike.
    """
    where = getattr(model, "repeats", None)
    if where is None:
        raise UserError("model", type(model).__name__, "to scan layers, a model that says which of them it repeats")
    parts = take_apart(model)
    layers: Sequence[nnx.Module] = getattr(model, where)
    kinds = _kinds(layers, parts, where)
    first, count = f"{where}.0.", len(layers)
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in parts.params.items()}
    one: Any = parts.rebuild(shapes)
    setattr(one, where, Stacked(getattr(one, where)[0], count))
    stacked = take_apart(one)
    own = {f"{where}.every.{kind}": tuple(f"{where}.{i}.{kind}" for i in range(count)) for kind in kinds}
    params: Any = {}
    for name, shape in stacked.params.items():
        assert name in own or not name.startswith(first)
        lead = (count,) if name in own else ()
        params[name] = jax.ShapeDtypeStruct((*lead, *shape.shape), shape.dtype)
    specs = {name: P(None, *spec) if name in own else spec for name, spec in stacked.specs.items()}
    return Stack(stacked._replace(params=params, specs=specs), own)


def _kinds(layers: Sequence[nnx.Module], parts: Parts, where: str) -> list[str]:
    """Names of a layer's parameters, once it is known that all layers differ in nothing but their values."""
    if len(layers) < 2:
        raise UserError("model", f"{len(layers)} layers", "to scan layers, at least 2")

    def form(index: int, layer: nnx.Module) -> tuple[Any, ...]:
        split: Any = nnx.split(layer, nnx.Param, ...)
        graphdef, _, rest = split
        prefix = f"{where}.{index}."
        names = [name.removeprefix(prefix) for name in parts.params if name.startswith(prefix)]
        arrays = [(kind, parts.params[prefix + kind], parts.specs[prefix + kind]) for kind in names]
        shapes = [(kind, array.shape, array.dtype, spec) for kind, array, spec in arrays]
        return graphdef, len(jax.tree.leaves(rest)), shapes

    first, *others = (form(index, layer) for index, layer in enumerate(layers))
    for index, other in enumerate(others, start=1):
        if other != first:
            raise UserError("model", f"{where}.0 and {where}.{index}", "to scan layers, layers that are all alike")
    if first[1]:
        raise UserError("model", f"{where}.0 with state of its own", "to scan layers, layers of parameters alone")
    return [kind for kind, *_ in first[2]]


def join_layers(layers: Sequence[jax.Array], sharding: NamedSharding, *, used_up: bool) -> jax.Array:
    """The layers' arrays of one kind as a stacked one; they are deleted where they are `used_up`."""
    joined = _joined(layers, sharding)
    for layer in layers if used_up else ():
        layer.delete()
    return joined


@partial(jax.jit, static_argnames="sharding")
def _joined(layers: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.stack(layers), sharding)
