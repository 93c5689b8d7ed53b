"""Stacked layers: identical layers as one layer whose parameters have a leading dim, run by a single scan."""

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

from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.errors import UserError
from axonn_jax.core.models.declared.segments import check_repeats
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.tensor.params import Params, SplitModule, shapes_of, split_module

# Users, checkpoints and optimizers see per-layer names such as `blocks.3.attention.qkv.kernel`. Stacked, these kernels
# are `blocks.every.attention.qkv.kernel`, [blocks, ...], with a leading dim that is never sharded. If kinds of layers
# alternate, the scan's body runs one of each, and the second kind's parameters are under `blocks.every.1`.

Carry = TypeVar("Carry")


class LayerForm(NamedTuple):
    """Everything about a layer except the values of its parameters."""

    graph: object
    state: int
    """Number of arrays that are neither parameters nor random streams; streams restart from a key at each call."""
    params: list[tuple[str, tuple[int, ...], jnp.dtype, P]]
    """Name within the layer, shape, dtype and layout of each parameter."""


def layer_form(layer: nnx.Module, prefix: str, parts: SplitModule) -> LayerForm:
    """Return the form of the layer whose parameter names in `parts` start with `prefix`."""
    split: Any = nnx.split(layer, nnx.Param, nnx.RngState, ...)
    graph, _, _, other_state = split
    layer_params = {name: array for name, array in parts.params.items() if name.startswith(prefix)}
    params = [(name.removeprefix(prefix), a.shape, a.dtype, parts.specs[name]) for name, a in layer_params.items()]
    return LayerForm(graph, len(jax.tree.leaves(other_state)), params)


class Stacked(nnx.Module):
    """Sequence of layers held as `every`: one layer of each alternating kind, whose parameters are [count, ...]."""

    # Metadata of the parameters stays that of a single layer, because the scan's body sees one layer at a time.

    def __init__(self, kinds: Sequence[nnx.Module], count: int):
        self.count, self.period = count, len(kinds)
        self.every = kinds[0] if len(kinds) == 1 else nnx.List(list(kinds))

    def run(self, body: Callable[[nnx.Module, Carry, jax.Array], Carry], carry: Carry) -> Carry:
        """Call body(layer, carry, index) for each layer in order by `lax.scan`, and return the last carry.

        The body is traced and compiled once. It must preserve the carry's shapes, dtypes and varying axes.
        """
        kinds: Any = [self.every] if self.period == 1 else self.every
        split: Any = [nnx.split(kind, nnx.Param, ...) for kind in kinds]

        def step(carry: Carry, layers: tuple[jax.Array, Any]) -> tuple[Carry, None]:
            index, params = layers
            for position, ((graphdef, _, other_state), layer_params) in enumerate(zip(split, params, strict=True)):
                if self.period > 1:
                    layer_params, carry = _in_turn(layer_params, carry)
                layer = nnx.merge(graphdef, layer_params, other_state)
                carry = body(layer, carry, index * jnp.uint32(self.period) + jnp.uint32(position))
            return carry, None

        carry, _ = lax.scan(
            step, carry, (jnp.arange(self.count, dtype=jnp.uint32), [layer_params for _, layer_params, _ in split])
        )
        return carry


@jax.custom_vjp
def _in_turn(params: object, carry: object) -> Any:
    # Identity that makes the gradient of a layer's input wait for those of its parameters. XLA would defer the latter
    # to the end of the loop's body, and keep the activations they need for all of the body's layers.
    return params, carry


def _backward(_: None, grads: tuple[object, Carry]) -> tuple[object, Carry]:
    params, carry = grads
    return params, jax.tree.map(lambda grad: reduce(depend_on, jax.tree.leaves(params), grad), carry)


_in_turn.defvjp(lambda params, carry: ((params, carry), None), _backward)


@dataclass(frozen=True)
class Stack:
    """Split model in two forms, with stacked and with separate layers."""

    parts: SplitModule
    """Parts in the form that programs use, with stacked layers."""
    per_layer: SplitModule
    """Parts in the form that users, checkpoints and optimizers see, with separate layers."""
    layer_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per-layer names, in order, of every stacked parameter; empty if nothing is stacked."""

    def join(self, params: Mapping[str, jax.Array], mesh: Mesh, *, used_up: bool = False) -> Params:
        """Stack per-layer parameters that lie on the mesh; missing ones are skipped; no collectives.

        Args:
            params: Parameters by per-layer name.
            mesh: Mesh of the parameters.
            used_up: True to delete the per-layer arrays after each parameter, so that only one is in memory twice.
        """
        stacked: Params = {}
        for name, spec in self.parts.specs.items():
            names = self.layer_names.get(name, (name,))
            if names[0] not in params:
                continue
            layers = [params[layer] for layer in names]
            if name not in self.layer_names:
                stacked[name] = layers[0]
                continue
            stacked[name] = join_layers(layers, NamedSharding(mesh, spec), used_up=used_up)
        return stacked


def unstacked(split: SplitModule) -> Stack:
    """Return the model without any stacked layers."""
    shapes = shapes_of(split)
    return Stack(shapes, shapes)


def stack_layers(model: nnx.Module, split: SplitModule) -> Stack:
    """Stack the layers in the model's attribute `layer_list`; `split` holds the parts of the model.

    Raises:
        UserError: The layers differ, are fewer than two of a kind, or do not form full periods.
    """
    checked = check_model(model)
    list_name, period = checked.layer_list, checked.layer_period
    if not period:
        raise UserError("model", type(model).__name__, "to scan layers, a Transformer, whose layers are alike")
    # Work on shapes: nothing is allocated, and the model itself is not modified.
    parts = shapes_of(split)
    layers: Sequence[nnx.Module] = getattr(model, list_name)
    check_repeats(len(layers), period)
    merged = parts.merge(parts.params)
    setattr(merged, list_name, Stacked(list(getattr(merged, list_name)[:period]), len(layers) // period))
    stacked = split_module(merged)
    layer_names: dict[str, tuple[str, ...]] = {}
    for at in range(period):
        names = [f"{list_name}.{index}." for index in range(at, len(layers), period)]
        every = f"{list_name}.every." + (f"{at}." if period > 1 else "")
        layer_names |= {
            every + kind: tuple(name + kind for name in names) for kind in _kinds(layers[at::period], parts, names)
        }
    count = len(layers) // period
    params: Any = {}
    for name, shape in stacked.params.items():
        assert name in layer_names or not name.startswith(f"{list_name}.")
        lead = (count,) if name in layer_names else ()
        params[name] = jax.ShapeDtypeStruct((*lead, *shape.shape), shape.dtype)
    specs = {name: P(None, *spec) if name in layer_names else spec for name, spec in stacked.specs.items()}
    return Stack(stacked._replace(params=params, specs=specs), parts, layer_names)


def _kinds(layers: Sequence[nnx.Module], parts: SplitModule, names: Sequence[str]) -> list[str]:
    # Checks that the layers differ only in parameter values, and returns the names of a layer's parameters.
    first, *other_forms = (layer_form(layer, name, parts) for name, layer in zip(names, layers, strict=True))
    for name, form in zip(names[1:], other_forms, strict=True):
        if form != first:
            accepted = "to scan layers, layers that are all alike"
            raise UserError("model", f"{names[0][:-1]} and {name[:-1]}", accepted)
    if first.state:
        raise UserError("model", f"{names[0][:-1]} with state of its own", "to scan layers, layers of parameters alone")
    return [kind for kind, *_ in first.params]


def join_layers(layers: Sequence[jax.Array], sharding: NamedSharding, *, used_up: bool) -> jax.Array:
    """Stack the arrays of one parameter over all layers; `used_up` deletes the separate arrays."""
    stacked = _stack_arrays(layers, sharding)
    for layer in layers if used_up else ():
        layer.delete()
    return stacked


@partial(jax.jit, static_argnames="sharding")
def _stack_arrays(layers: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    return lax.with_sharding_constraint(jnp.stack(layers), sharding)


def run_layers(
    layers: Stacked | Sequence[nnx.Module], body: Callable[[Any, Carry, jax.Array | int], Carry], carry: Carry
) -> Carry:
    """Call body(layer, carry, index) for each layer in order, stacked or separate, and return the last carry."""
    if isinstance(layers, Stacked):
        return layers.run(body, carry)
    for index, layer in enumerate(layers):
        carry = body(layer, carry, index)
    return carry
