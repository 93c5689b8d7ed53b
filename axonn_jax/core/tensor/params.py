"""Sharded parameters: creation in place, splitting modules into named parameters and back, norms of gradients."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axonn_jax.core import compat
from axonn_jax.core.grid import MESH_AXES, REPLICA_AXES
from axonn_jax.core.tensor.collectives import all_reduce, axis_size, mark_varying
from axonn_jax.core.tensor.specs import spec_axes

Params = dict[str, jax.Array]
Specs = dict[str, PartitionSpec]
Role = Literal["", "norm", "router", "load", "adapter"]
"""Role of a parameter, declared at its creation. A parameter with a role is never pruned, and it and its gradient are
float32 in every precision. Roles are those of norms and routers, which are read in float32; of the bias whose gradient
is its experts' `load` (`experts.load`); and of an `adapter` (`adapters.layers`), next to which nothing else is trained.
"""
GENERATOR = "threefry2x32"
"""Name of the generator of all random numbers. A site may set jax's default to `rbg`, whose numbers depend on the
layout and on `jax.vmap`."""


def key_of(seed: int | jax.Array) -> jax.Array:
    """Return the random key of a seed, always for `GENERATOR`."""
    return jax.random.key(seed, impl=GENERATOR)


def portable_keys(key: jax.Array, count: int) -> list[jax.Array]:
    """Return `count` keys of `GENERATOR`, derived from a user's key of any generator.

    A seed's key begins with the same words for `rbg` as for `GENERATOR`, so a model gets the same weights with both.
    """
    root = jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl=GENERATOR)
    return [jax.random.fold_in(root, number) for number in range(count)]


def normal_param(
    key: jax.Array,
    shape: tuple[int, ...],
    std: float,
    spec: PartitionSpec,
    *,
    padded: tuple[int, ...] | None = None,
    role: Role = "",
) -> nnx.Param[jax.Array]:
    """Return a float32 parameter drawn from a normal distribution with mean 0 and standard deviation `std`.

    Under `jax.set_mesh` each device creates only its own shard; the values do not depend on the mesh.

    Args:
        key: Random key.
        shape: Global shape of the drawn values.
        std: Standard deviation.
        spec: Layout.
        padded: Global shape of the parameter, zero beyond `shape`; None for `shape` itself.
        role: Role of the parameter.
    """
    return _param(_normal(shape, std, padded or shape), key, spec, role)


def uniform_param(
    key: jax.Array, shape: tuple[int, ...], bound: float, spec: PartitionSpec, *, role: Role = ""
) -> nnx.Param[jax.Array]:
    """Return a float32 parameter of global `shape`, laid out by `spec`, drawn uniformly from [-`bound`, `bound`)."""
    return _param(_uniform(shape, bound), key, spec, role)


def constant_param(
    shape: tuple[int, ...], value: float, spec: PartitionSpec, *, role: Role = ""
) -> nnx.Param[jax.Array]:
    """Return a float32 parameter of global `shape`, laid out by `spec`, filled with `value`."""
    return _param(_constant(shape, value), None, spec, role)


# Cached, so that parameters of one kind share a function object and jit compiles it once.
@functools.cache
def _normal(shape: tuple[int, ...], std: float, padded: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    def draw(key: jax.Array) -> jax.Array:
        drawn = jnp.float32(std) * jax.random.normal(key, shape, jnp.float32)
        return drawn if padded == shape else jnp.pad(drawn, [(0, b - a) for a, b in zip(shape, padded, strict=True)])

    return draw


@functools.cache
def _uniform(shape: tuple[int, ...], bound: float) -> Callable[[jax.Array], jax.Array]:
    return lambda key: jax.random.uniform(key, shape, jnp.float32, -bound, bound)


@functools.cache
def _constant(shape: tuple[int, ...], value: float) -> Callable[[None], jax.Array]:
    return lambda _: jnp.full(shape, value, jnp.float32)


@functools.cache
def _on_mesh(init: Callable[..., jax.Array], sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(init, out_shardings=sharding)


def _param(
    init: Callable[..., jax.Array], key: jax.Array | None, spec: PartitionSpec, role: Role
) -> nnx.Param[jax.Array]:
    mesh = compat.context_mesh()
    value = init(key) if mesh is None else _on_mesh(init, NamedSharding(mesh, spec))(key)
    declared: dict[str, Any] = {"axonn_role": role} if role else {}
    return nnx.Param(value, out_sharding=spec, eager_sharding=False, **declared)


class SplitModule(NamedTuple):
    """Module split into parameters and layouts by dotted path, with a function that rebuilds it."""

    params: Params
    specs: Specs
    merge: Callable[[Mapping[str, jax.Array]], nnx.Module]
    roles: Mapping[str, Role] = MappingProxyType({})
    """Roles by name, for parameters that have one."""

    @property
    def loads(self) -> frozenset[str]:
        """Names of the trained parameters whose gradients are counts."""
        return frozenset(name for name in self.trained if self.roles.get(name) == "load")

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters' parameters; if there are any, only they are trained."""
        return frozenset(name for name, role in self.roles.items() if role == "adapter")

    @property
    def trained(self) -> Params:
        """Trained parameters by name."""
        adapters = self.adapters
        return {name: p for name, p in self.params.items() if name in adapters} if adapters else self.params

    @property
    def frozen(self) -> Params:
        """Parameters that no step changes, by name."""
        trained = self.trained
        return {name: p for name, p in self.params.items() if name not in trained}

    def sum_axes(self, name: str, token_axes: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which a device's gradient of a parameter is a partial sum.

        These are the axes that split tokens, and for an adapter, whose products are partial sums, all others as well.
        Callers leave out the axes that split the parameter itself.
        """
        return MESH_AXES if name in self.adapters else tuple(token_axes)


def split_module(module: nnx.Module) -> SplitModule:
    """Split a module into flat dicts of parameters and layouts, and a function that rebuilds the module.

    Names are attribute paths joined by dots (``blocks.3.attention.qkv.kernel``), independent of the grid.
    """
    split: Any = nnx.split(module, nnx.Param, ...)
    graphdef, state, other_state = split
    flat = {".".join(map(str, path)): (path, var) for path, var in nnx.to_flat_state(state)}
    # Keep shapes only: a trainer holds `merge` for its lifetime, and the closure must not keep the arrays alive.
    empty = {name: (path, var.replace(jax.tree.map(_shape, var.get_value()))) for name, (path, var) in flat.items()}

    def merge(params: Mapping[str, jax.Array]) -> nnx.Module:
        pairs = [(path, var.replace(params[name])) for name, (path, var) in empty.items()]
        return nnx.merge(graphdef, nnx.from_flat_state(pairs), renewed(other_state))

    params = {name: var.get_value() for name, (_, var) in flat.items()}
    metadata = {name: var.get_metadata() for name, (_, var) in flat.items()}
    specs = {name: layout(entry) for name, entry in metadata.items()}
    roles = {name: entry["axonn_role"] for name, entry in metadata.items() if "axonn_role" in entry}
    return SplitModule(params, specs, merge, roles)


def evaluating(parts: SplitModule) -> SplitModule:
    """Return a split module in Flax's evaluation mode (``nnx.Module.eval``); the same object if nothing changes.

    Args:
        parts: The split module; its parameters may be shapes.
    """

    def merge(params: Mapping[str, jax.Array]) -> nnx.Module:
        module = parts.merge(params)
        module.eval()
        return module

    changes = nnx.graphdef(merge(parts.params)) != nnx.graphdef(parts.merge(parts.params))
    return parts._replace(merge=merge) if changes else parts


def renewed(state: Any) -> object:
    """Return a state with the same values in new variables, which a traced module may modify."""
    return nnx.from_flat_state([(path, var.replace(var.get_value())) for path, var in nnx.to_flat_state(state)])


def abstract_module(make: Callable[[], nnx.Module]) -> nnx.Module:
    """Return the module that `make` builds with shapes in place of parameters; other state has real values."""
    module: nnx.Module = nnx.eval_shape(make)
    state = nnx.Not(nnx.Param)
    if jax.tree.leaves(nnx.state(module, state)):
        nnx.update(module, jax.jit(lambda: nnx.state(make(), state))())
    return module


def _shape(value: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def place_params(params: Params, specs: Specs, mesh: Mesh) -> Params:
    """Lay parameters out on a mesh; those already in their layout are returned unchanged."""
    shardings = {name: NamedSharding(mesh, specs[name]) for name in params}
    # For a process-local array `jax.device_put` would send all values to the other processes to compare them.
    copies = {
        name: copied(p, shardings[name])
        for name, p in params.items()
        if p.is_fully_addressable and not shardings[name].is_fully_addressable
    }
    remaining = {name: p for name, p in params.items() if name not in copies}
    return copies | jax.device_put(remaining, {name: shardings[name] for name in remaining})


def _shares_shards(value: jax.Array, sharding: NamedSharding) -> bool:
    """True if `jax.device_put` shares a shard between arrays on different devices despite `may_alias=False`."""
    # As of jax 0.10.2.
    current = value.sharding
    same = current.shard_shape(value.shape) == sharding.shard_shape(value.shape)
    return same and current.device_set != sharding.device_set


def copied(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Copy an array into new memory, laid out on a mesh that may span processes, which must all pass the same value."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = copied(jax.random.key_data(value), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
        if isinstance(value, jax.Array) and _shares_shards(value, sharding):
            value = jax.device_put(value, value.sharding, may_alias=False)
        return jax.device_put(value, sharding, may_alias=False)
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def shapes_of(parts: SplitModule, dtype: jnp.dtype | None = None) -> SplitModule:
    """Return the same parts with shapes in place of parameters, in `dtype` if given, except for those with a role."""
    shapes: Any = {
        name: jax.ShapeDtypeStruct(p.shape, p.dtype if dtype is None or name in parts.roles else dtype)
        for name, p in parts.params.items()
    }
    return parts._replace(params=shapes)


def layout(metadata: Mapping[str, Any]) -> PartitionSpec:
    """Return the layout a parameter was declared with; replicated if there is none, as in plain Flax layers."""
    declared = metadata.get("out_sharding")
    return PartitionSpec() if declared is None else PartitionSpec(*declared)


def global_norm(grads: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec]) -> jax.Array:
    """Return the Euclidean norm of all gradients; the collective is that of `square_sum`."""
    return jnp.sqrt(square_sum(grads, specs))


def square_sum(grads: Mapping[str, jax.Array], specs: Mapping[str, PartitionSpec]) -> jax.Array:
    """Return the sum of squares of all gradients, each counted once despite replication.

    For use inside a manual region, on gradients already reduced over the axes that replicate them. Collective: one
    all-reduce of a scalar over `z`, `y`, `x`, and `data` and `expert` where they split parameters.
    """
    split = frozenset().union(*(spec_axes(specs[name]) for name in grads))
    axes = tuple(axis for axis in MESH_AXES if axis not in REPLICA_AXES or axis in split)
    total = mark_varying(jnp.zeros((), jnp.float32), axes)
    for name, grad in grads.items():
        square = jnp.sum(jnp.square(grad.astype(jnp.float32)))
        # The all-reduce counts a replicated gradient once per copy.
        copies = 1
        for axis in axes:
            copies *= 1 if axis in spec_axes(specs[name]) else axis_size(axis)
        total = total + mark_varying(square, axes) / copies
    return all_reduce(total, axes)
