"""Optax wrapper that keeps an optimizer's state in host memory, for users' training loops."""

from collections.abc import Mapping
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.memory.buckets import Leaf, plan_buckets
from axonn_jax.core.memory.host_arrays import HOST, stream, transferred
from axonn_jax.core.memory.optimizer_state import state_layout
from axonn_jax.core.memory.optimizer_traits import check_offload, check_optimizer_type


@typed_arguments
def offload(optimizer: optax.GradientTransformation, *, bucket: int = 16_000_000) -> optax.GradientTransformation:
    """Return the optimizer with its state in host memory, streamed through the devices in buckets of parameters.

    Parameters of a bucket are updated together. Their state is copied to the devices during the update of the previous
    bucket, and back during that of the next. Arrays keep their sharding. Call `init` and `update` outside `jax.jit`;
    each bucket's update is a compiled program. Masks and labels of the optimizer see parameters as a flat dict keyed by
    path (`jax.tree_util.keystr`). No collectives.

    Args:
        optimizer: A transformation that treats every parameter independently.
        bucket: Most elements in a bucket; a larger parameter gets a bucket to itself.

    Returns:
        A transformation whose state is one optax state per bucket, keyed by the names of the bucket's parameters.

    Raises:
        UserError: The optimizer looks at all parameters together, a call is inside a JAX transformation, or `update`
            gets other parameters than `init` did.
    """
    _check_outside({})
    bucket = integer("bucket", bucket, 1)
    check_optimizer_type(optimizer)
    check_offload(optimizer, "axonn_jax.offload", {})

    @partial(jax.jit, donate_argnums=1)
    def updated(
        grads: optax.Updates, state: optax.OptState, params: optax.Params, extra: Mapping[str, object]
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
            return optax.with_extra_args_support(optimizer).update(grads, state, params, **extra)

    def init(params: optax.Params) -> dict[tuple[str, ...], optax.OptState]:
        flat = _flat(params)
        for name, leaf in flat.items():
            if not isinstance(leaf, jax.Array):
                raise UserError(f"params{name}", type(leaf).__name__, "an array of jax")
        # One group for all dtypes and shardings: parameters of a bucket only share a program and are never packed.
        leaves = [Leaf(name, leaf.size, ()) for name, leaf in flat.items()]
        groups = {}
        for names in plan_buckets(leaves, bucket):
            group = {name: flat[name] for name in names}
            layouts = {name: leaf.sharding for name, leaf in group.items()}
            first = layouts[names[0]]
            scalar = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first
            shardings = state_layout(jax.eval_shape(optimizer.init, group), group, layouts, scalar)
            groups[tuple(names)] = transferred(jax.jit(optimizer.init, out_shardings=shardings)(group), HOST)
        return groups

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, dict[tuple[str, ...], optax.OptState]]:
        flat, weights = _flat(grads), None if params is None else _flat(params)
        for argument, names in (
            ("state", {*chain(*state)} if isinstance(state, dict) else set()),
            ("params", {*(weights or flat)}),
        ):
            if names != flat.keys():
                raise UserError(
                    "axonn_jax.offload", f"{argument} of other parameters", "those of the gradients in update"
                )
        groups, states = list(state), list(state.values())
        updates: dict[str, jax.Array] = {}

        def update_group(number: int, state: optax.OptState) -> optax.OptState:
            names = groups[number]
            group_params = None if weights is None else {name: weights[name] for name in names}
            group_updates, state = updated({name: flat[name] for name in names}, state, group_params, extra)
            updates.update(group_updates)
            return state

        stream(states, update_group)
        tree = jax.tree.unflatten(jax.tree.structure(grads), [updates[name] for name in flat])
        return tree, dict(zip(groups, states, strict=True))

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _flat(tree: optax.Params) -> dict[str, jax.Array]:
    flat = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    _check_outside(flat)
    return flat


def _check_outside(values: Mapping[str, object]) -> None:
    """Raise ``UserError`` inside a JAX transformation."""
    # A fresh array shows a surrounding `jax.jit` even where no argument is traced.
    if any(isinstance(value, jax.core.Tracer) for value in (*values.values(), jnp.zeros(()))):
        raise UserError("axonn_jax.offload", "a call inside jax.jit", "offload, init and update outside of it")
