"""Host-resident optimizer state for a training script of one's own: an optax transformation around another one."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from axonn_jax.errors import UserError
from axonn_jax.memory.buckets import Leaf, plan_buckets
from axonn_jax.memory.elementwise import check_elementwise
from axonn_jax.memory.held import moved
from axonn_jax.memory.placement import HOST

Group = tuple[str, ...]


class HostState(NamedTuple):
    """The wrapped transformation's state for every group of parameters; arrays are in host memory."""

    groups: dict[Group, Any]


def offload(optimizer: optax.GradientTransformation, *, bucket: int = 16_000_000) -> optax.GradientTransformation:
    """The optimizer with its state in host memory, streamed through the devices a bucket of parameters at a time.

    Parameters of at most `bucket` elements in all, or one that has more, are updated together: their state is copied
    to the devices while the bucket before is updated, and back while the next one is. Arrays keep their sharding. Call
    `init` and `update` outside of `jax.jit`; each bucket's update is a compiled program. Masks and labels of the
    optimizer see parameters as a flat dict by path (`jax.tree_util.keystr`). No collectives.

    Raises ``UserError`` where the optimizer is not elementwise, or when it is called inside a transformation.
    """
    check_elementwise(optimizer, "axonn_jax.offload")

    @partial(jax.jit, donate_argnums=1)
    def updated(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            return optimizer.update(grads, state, params)

    def init(params: Any) -> HostState:
        flat = _flat(params)
        start = jax.jit(optimizer.init)
        groups = {}
        for group in _groups(flat, bucket):
            own = {name: flat[name] for name in group}
            groups[group] = _to_host(_like_params(start(own), own))
        return HostState(groups)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, HostState]:
        flat = _flat(grads)
        weights = None if params is None else _flat(params)
        groups = list(state.groups)
        updates: dict[str, jax.Array] = {}
        after: dict[Group, Any] = {}
        arriving = _to_device(state.groups[groups[0]])
        for number, group in enumerate(groups):
            here = arriving
            if number >= 2:
                jax.block_until_ready(after[groups[number - 2]])  # room on the devices for the next
            if number + 1 < len(groups):
                arriving = _to_device(state.groups[groups[number + 1]])
            own = None if weights is None else {name: weights[name] for name in group}
            new, here = updated({name: flat[name] for name in group}, here, own)
            updates.update(new)
            after[group] = _to_host(here)
        tree = jax.tree.structure(grads)
        return jax.tree.unflatten(tree, [updates[name] for name in flat]), HostState(after)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


def _flat(tree: Any) -> dict[str, Any]:
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    if any(isinstance(leaf, jax.core.Tracer) for leaf in flat.values()):
        raise UserError("axonn_jax.offload", "a call inside jax.jit", "calls of init and update outside of it")
    return flat


def _groups(flat: Mapping[str, Any], bucket: int) -> list[Group]:
    leaves = [Leaf(name, leaf.size, ()) for name, leaf in flat.items()]
    return [tuple(names) for names in plan_buckets(leaves, bucket)]


def _like_params(state: Any, params: Mapping[str, Any]) -> Any:
    """State with the sharding of the parameter it belongs to, numbers on all of its devices."""

    def place(path: Any, leaf: jax.Array) -> jax.Array:
        name = next((key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in params), None)
        if name is not None and params[name].shape == leaf.shape:
            return jax.device_put(leaf, params[name].sharding)
        mesh = getattr(next(iter(params.values())).sharding, "mesh", None)
        return leaf if mesh is None else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree_util.tree_map_with_path(place, state)


def _to_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: _moved(leaf, HOST) if leaf.ndim else leaf, tree)


def _to_device(tree: Any) -> Any:
    # Numbers are copied too: what a program is given it uses up.
    return jax.tree.map(lambda leaf: _moved(leaf, "device"), tree)


def _moved(leaf: jax.Array, kind: str) -> jax.Array:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding | SingleDeviceSharding)
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    to = sharding.with_memory_kind(kind) if kind in kinds else sharding
    return moved([leaf], [to])[0]
