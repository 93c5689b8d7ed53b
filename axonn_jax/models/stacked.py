"""Layers that are alike as one layer whose parameters have a leading dim: one compiled body runs them all.

A layer's own parameters, such as `blocks.3.attention.qkv.kernel`, are the names for users, checkpoints and optimizers.
Stacked, the kernels of all blocks are `blocks.every.attention.qkv.kernel`, [blocks, ...]; the new dim is never sharded.
Where kinds of layers alternate, one of each is the loop's body, and the kernels of the second kind are those of
`blocks.every.1`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.repairs import after
from axonn_jax.errors import UserError
from axonn_jax.models.protocol import check_model
from axonn_jax.models.segments import check_repeats
from axonn_jax.tensor.params import Params, SplitModule, shapes_of, split_module

Carry = TypeVar("Carry")


class LayerForm(NamedTuple):
    """All of a layer but the values of its parameters."""

    graph: Any
    state: int
    """Arrays that are neither parameters nor of random streams, which begin from a key that a layer is given."""
    params: list[tuple[str, tuple[int, ...], Any, P]]
    """Name in the layer, shape, dtype and layout of each."""


def layer_form(layer: nnx.Module, prefix: str, parts: SplitModule) -> LayerForm:
    """The form of a layer whose parameters' names in `parts` begin with `prefix`."""
    split: Any = nnx.split(layer, nnx.Param, nnx.RngState, ...)
    graph, _, _, rest = split
    own = {name: array for name, array in parts.params.items() if name.startswith(prefix)}
    params = [(name.removeprefix(prefix), a.shape, a.dtype, parts.specs[name]) for name, a in own.items()]
    return LayerForm(graph, len(jax.tree.leaves(rest)), params)


class Stacked(nnx.Module):
    """A row of layers as `every`, one of each kind that takes its turn, whose parameters are [count, ...].

    Parameters keep the layout that one layer declares, which is how `every` is used: a layer at a time.
    """

    def __init__(self, kinds: Sequence[nnx.Module], count: int):
        self.count, self.period = count, len(kinds)
        self.every = kinds[0] if len(kinds) == 1 else nnx.List(list(kinds))

    def run(self, body: Callable[[Any, Carry, jax.Array], Carry], carry: Carry) -> Carry:
        """Call body(layer, carry, index) for the layers in order, by `lax.scan`, and give the last carry.

        Traced and compiled once, whatever the count. The carry keeps its shapes, dtypes and varying axes.
        """
        kinds: Any = [self.every] if self.period == 1 else self.every
        split: Any = [nnx.split(kind, nnx.Param, ...) for kind in kinds]

        def step(carry: Carry, layers: tuple[jax.Array, Any]) -> tuple[Carry, None]:
            index, params = layers
            for at, ((graphdef, _, rest), own) in enumerate(zip(split, params, strict=True)):
                if self.period > 1:
                    own, carry = _in_turn(own, carry)
                layer = nnx.merge(graphdef, own, rest)
                carry = body(layer, carry, index * jnp.uint32(self.period) + jnp.uint32(at))
            return carry, None

        carry, _ = lax.scan(step, carry, (jnp.arange(self.count, dtype=jnp.uint32), [own for _, own, _ in split]))
        return carry


@jax.custom_vjp
def _in_turn(params: Any, carry: Any) -> Any:
    """Return a layer's parameters and input; the input's gradient waits for the parameters'.

    XLA would put these off to the end of the loop's body, and keep what they are computed from for all its layers.
    """
    return params, carry


def _backward(_: None, grads: Any) -> Any:
    params, carry = grads
    return params, jax.tree.map(lambda grad: reduce(after, jax.tree.leaves(params), grad), carry)


_in_turn.defvjp(lambda params, carry: ((params, carry), None), _backward)


@dataclass(frozen=True)
class Stack:
    """Split model in two forms, with layers stacked and one by one."""

    parts: SplitModule
    """Parts in the programs' form, stacked layers with their dim in front."""
    per_layer: SplitModule
    """Parts in the form for users, checkpoints and optimizers."""
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The layers' names, first to last, of every stacked parameter; none where nothing is stacked."""

    def join(self, params: Mapping[str, jax.Array], mesh: Mesh, *, used_up: bool = False) -> Params:
        """Parameters on the mesh under the layers' own names -> stacked, as far as they are given; no collectives.

        With `used_up` the layers' arrays are deleted kind by kind, so that both forms of only one kind take memory.
        """
        joined: Params = {}
        for name, spec in self.parts.specs.items():
            names = self.own.get(name, (name,))
            if names[0] not in params:
                continue
            layers = [params[layer] for layer in names]
            if name not in self.own:
                joined[name] = layers[0]
                continue
            joined[name] = join_layers(layers, NamedSharding(mesh, spec), used_up=used_up)
        return joined


def unstacked(split: SplitModule) -> Stack:
    """The model as it is."""
    shapes = shapes_of(split)
    return Stack(shapes, shapes)


def stack_layers(model: nnx.Module, split: SplitModule) -> Stack:
    """The model with the layers of its attribute `layer_list` stacked; `split` is the model's.

    Raises ``UserError`` where its layers are fewer than two of a kind, not alike, or end between two kinds.
    """
    checked = check_model(model)
    where, period = checked.layer_list, checked.layer_period
    if not period:
        raise UserError("model", type(model).__name__, "to scan layers, a Transformer, whose layers are alike")
    parts = shapes_of(split)
    layers: Sequence[nnx.Module] = getattr(model, where)
    check_repeats(len(layers), period)
    merged: Any = parts.merge(parts.params)
    setattr(merged, where, Stacked(list(getattr(merged, where)[:period]), len(layers) // period))
    stacked = split_module(merged)
    own: dict[str, tuple[str, ...]] = {}
    for at in range(period):
        names = [f"{where}.{index}." for index in range(at, len(layers), period)]
        every = f"{where}.every." + (f"{at}." if period > 1 else "")
        own |= {every + kind: tuple(name + kind for name in names) for kind in _kinds(layers[at::period], parts, names)}
    count = len(layers) // period
    params: Any = {}
    for name, shape in stacked.params.items():
        assert name in own or not name.startswith(f"{where}.")
        lead = (count,) if name in own else ()
        params[name] = jax.ShapeDtypeStruct((*lead, *shape.shape), shape.dtype)
    specs = {name: P(None, *spec) if name in own else spec for name, spec in stacked.specs.items()}
    return Stack(stacked._replace(params=params, specs=specs), parts, own)


def _kinds(layers: Sequence[nnx.Module], parts: SplitModule, names: Sequence[str]) -> list[str]:
    """Names of a layer's parameters, once it is known that all layers differ in nothing but their values."""
    first, *others = (layer_form(layer, name, parts) for name, layer in zip(names, layers, strict=True))
    for name, form in zip(names[1:], others, strict=True):
        if form != first:
            accepted = "to scan layers, layers that are all alike"
            raise UserError("model", f"{names[0][:-1]} and {name[:-1]}", accepted)
    if first.state:
        raise UserError("model", f"{names[0][:-1]} with state of its own", "to scan layers, layers of parameters alone")
    return [kind for kind, *_ in first.params]


def join_layers(layers: Sequence[jax.Array], sharding: NamedSharding, *, used_up: bool) -> jax.Array:
    """The layers' arrays of one kind as a stacked one; they are deleted where they are `used_up`."""
    joined = _joined(layers, sharding)
    for layer in layers if used_up else ():
        layer.delete()
    return joined


@partial(jax.jit, static_argnames="sharding")
def _joined(layers: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.stack(layers), sharding)


def run_layers(layers: Stacked | Sequence[Any], body: Callable[[Any, Carry, Any], Carry], carry: Carry) -> Carry:
    """Call body(layer, carry, index) for layers in order, stacked or not, and return the last carry."""
    if isinstance(layers, Stacked):
        return layers.run(body, carry)
    for index, layer in enumerate(layers):
        carry = body(layer, carry, index)
    return carry
