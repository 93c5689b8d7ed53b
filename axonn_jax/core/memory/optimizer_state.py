"""Optimizer state on the devices: float32 master weights, moments, the weights that layers read, and their update."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from axonn_jax.core.backend.traits import branches_freely
from axonn_jax.core.memory.optimizer_traits import Arrays, owner, updated
from axonn_jax.core.memory.precision import FULL, Precisions
from axonn_jax.core.memory.report import Shapes, StateBytes, local_elements, state_bytes
from axonn_jax.core.memory.zero import gather_weights
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.weight_gather import Weights

T = TypeVar("T")


class ModelState(NamedTuple):
    """State that an update changes."""

    weights: Weights
    """Weights that layers read: float32, or the compute dtype if there are separate masters."""
    masters: Params
    """Float32 weights in the optimizer's layout; empty if `weights` are the masters, or with offload. A pruned
    parameter has only its remaining values here and in its optimizer state."""
    optimizer: optax.OptState
    """Optax state, laid out like the masters; with offload, a list of (masters, optax state) by bucket."""


Apply = Callable[[ModelState, Params, jax.Array, jax.Array], tuple[ModelState, jax.Array]]
"""Function from (state, gradients, factor, loss) to the next state and an array that is ready once it has run."""


@dataclass(frozen=True)
class DeviceOptimizer:
    """Any optax transformation, with its state on the devices, for parameters on one mesh."""

    optimizer: optax.GradientTransformation
    mesh: Mesh
    shapes: Shapes
    specs: Specs
    """Layouts of the weights."""
    state_specs: Specs
    """Layouts of gradients, masters and optimizer state: `specs`, or with ZeRO split over `data` too."""
    precisions: Precisions = FULL
    bucket: int = 16_000_000
    """Elements per all-gather over `data`, if masters are split over it."""
    forms: PrunedLayout | None = None
    """Layout of the pruned parameters; their entries in `shapes` are the shapes of the trained values."""

    def start(self, params: Params, extra: Params = {}, *, owned: bool = True) -> ModelState:  # noqa: B006
        """Return the initial state of float32 parameters, reusing or freeing their arrays if they are `owned`.

        For pruned parameters, `params` has the trained values and `extra` the index arrays.
        """
        shardings = self.shardings(params)
        if not self._separate:
            return ModelState({**params}, {}, jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(params))
        state = jax.jit(self._first, out_shardings=shardings)(params, extra)
        if owned:
            jax.tree.map(lambda p: p.delete(), params)
        return state  # type: ignore[no-any-return]

    def apply_update(
        self, state: ModelState, grads: Params, factor: jax.Array, value: jax.Array, finite: jax.Array | None = None
    ) -> ModelState:
        """Return the state after an update in float32 with `factor` times the gradients; call it under `jax.jit`.

        Args:
            state: State to update.
            grads: Gradients, laid out by `state_specs`.
            factor: Scalar factor on the gradients.
            value: The loss.
            finite: Whether to update at all; None: always, since the host has checked.

        Collectives: if masters are split over `data`, an all-gather of the weights over it, in buckets,
        `(G-1)/G * itemsize * elements` bytes per device.
        """
        float_weights: Any = {name: weight for name, weight in state.weights.items() if name not in state.masters}
        old = (self._as_masters(float_weights) | state.masters, state.optimizer)

        def update(old: tuple[Params, optax.OptState], grads: Params) -> tuple[Params, optax.OptState]:
            masters, optimizer = old
            # Gradients come out of a manual region over the live axes, and their type keeps that smaller mesh. An
            # optimizer that draws noise lays it out by this type, which JAX rejects under another mesh.
            layouts = {name: NamedSharding(self.mesh, self.state_specs[name]) for name in grads}
            constrained = lax.with_sharding_constraint(grads, layouts)
            grads = {name: grad.astype(jnp.float32) * factor for name, grad in constrained.items()}
            updates, optimizer = updated(self.optimizer, grads, optimizer, masters, value)
            return optax.apply_updates(masters, updates), optimizer

        on_cores = branches_freely(self.mesh.devices.flat[0].platform)
        masters, optimizer = _update_if(finite, update, old, grads, on_cores=on_cores)
        return self._from_masters(masters, optimizer, {name: state.weights[name] for name in self._formed})

    def program(self, state: ModelState) -> Apply:
        """Return the update as a compiled program that donates the state."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        done = NamedSharding(self.mesh, P())

        def apply(
            state: ModelState, grads: Params, factor: jax.Array, value: jax.Array
        ) -> tuple[ModelState, jax.Array]:
            return self.apply_update(state, grads, factor, value), jnp.zeros((), jnp.int32)

        # With separate masters the old weights are never read; `keep_unused` lets the new ones reuse their memory.
        return jax.jit(apply, donate_argnums=0, out_shardings=(shardings, done), keep_unused=True)

    def restored(
        self,
        masters: Params,
        optimizer: optax.OptState,
        extra: Params = {},  # noqa: B006
        *,
        owned: bool = False,
    ) -> ModelState:
        """Return the state with these float32 weights, laid out like `masters`, and this optimizer state."""
        if not self._separate:
            return ModelState({**masters}, {}, optimizer)

        def make(masters: Params, optimizer: optax.OptState, extra: Params) -> ModelState:
            return self._from_masters(masters, optimizer, self._empty(extra))

        return jax.jit(make, out_shardings=self.shardings(masters))(masters, optimizer, extra)  # type: ignore[no-any-return]

    def opt_state(self, state: ModelState) -> optax.OptState:
        """Return the optax state."""
        return state.optimizer

    def masters(self, state: ModelState) -> Params:
        """Return the float32 weights by name; for pruned parameters their trained values."""
        return {**state.weights, **state.masters}  # type: ignore[dict-item]

    def bytes(self) -> StateBytes:
        """Return bytes per device, by formula."""
        layouts = (self.specs, self.state_specs)
        unpruned = state_bytes(self.shapes, *layouts, self.mesh, self.precisions, self.optimizer)
        if self.forms is None:
            return unpruned
        dense, values, state_values = (
            local_elements(shapes, specs, self.mesh)
            for shapes, specs in (
                (self.forms.shapes, self.specs),
                (self.forms.value_shapes, self.specs),
                (self.forms.value_shapes, self.state_specs),
            )
        )
        masters = 0 if self.precisions.master_weights else 4 * state_values
        weights = unpruned.weights + (dense - values) * self.precisions.weights.itemsize
        return replace(unpruned, weights=weights, masters=unpruned.masters + masters, positions=4 * values)

    def abstract(self) -> ModelState:
        """Return the abstract state, with layouts."""
        abstract: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self.shapes.items()}
        extra = {name: jax.ShapeDtypeStruct(self.shapes[name], jnp.int32) for name in self._formed}
        shapes = jax.eval_shape(self._first, abstract, extra)

        # A pruned weight is a tree of several arrays, hence the inner map.
        def with_sharding(sharding: NamedSharding, shapes: object) -> object:
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)

        return jax.tree.map(with_sharding, self.shardings(abstract), shapes)  # type: ignore[no-any-return]

    def shardings(self, params: Params) -> ModelState:
        """Return the shardings of the state for parameters, which may be abstract."""
        scalar = NamedSharding(self.mesh, P())
        masters = self._shardings(self.state_specs, params)
        optimizer = state_layout(jax.eval_shape(self.optimizer.init, params), params, masters, scalar)
        weights: Any = self._shardings(self.specs, params)
        return ModelState(weights, self._separate_masters(masters), optimizer)

    @property
    def _separate(self) -> bool:
        return self.precisions.master_weights or self.state_specs != self.specs or self.forms is not None

    @property
    def _formed(self) -> Iterable[str]:
        """Names of the pruned parameters."""
        return () if self.forms is None else self.forms.shapes

    def _empty(self, extra: Params) -> Weights:
        """Return weights of the pruned parameters, without values yet."""
        return {} if self.forms is None else self.forms.first(extra, self.precisions.weights)

    def _first(self, params: Params, extra: Params) -> ModelState:
        masters = self._as_masters(params)
        return self._from_masters(masters, self.optimizer.init(masters), self._empty(extra))

    def _as_masters(self, weights: Params) -> Params:
        if not self._separate:
            return weights
        return jax.tree.map(lax.with_sharding_constraint, weights, self._shardings(self.state_specs, weights))

    def _separate_masters(self, masters: Any) -> Any:
        """Return the masters that are not also the weights."""
        if self.precisions.master_weights:
            return masters
        return {name: masters[name] for name in self._formed}

    def _from_masters(self, masters: Params, optimizer: optax.OptState, onto: Weights) -> ModelState:
        """Return the state of masters; `onto` receives the values of pruned parameters."""
        if not self._separate:
            return ModelState({**masters}, {}, optimizer)
        layouts = (self.state_specs, self.specs)
        gathered = gather_weights(masters, layouts, self.mesh, self.precisions.weights_of, self.bucket)
        weights: Weights = {**gathered}
        if self.forms is not None:
            weights |= self.forms.written(onto, {name: gathered[name] for name in onto})
        return ModelState(weights, self._separate_masters(masters), optimizer)

    def _shardings(self, specs: Specs, names: Iterable[str]) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.mesh, specs[name]) for name in names}


def state_layout(state: optax.OptState, params: Arrays, shardings: Mapping[str, T], scalar: T) -> optax.OptState:
    """Return the layout of an optax state: a leaf of its parameter's shape has the parameter's, others `scalar`."""

    def layout(path: tuple[object, ...], leaf: jax.Array) -> T:
        name = owner(path, params)
        return scalar if name is None or params[name].shape != leaf.shape else shardings[name]

    return tree_map_with_path(layout, state)


def clip_factor(norm: jax.Array | float, clip: float) -> jax.Array:
    """Return the factor that scales gradients of global norm `norm` to at most `clip`; 1 if `clip` is 0.

    The coefficient is the published one (AxoNN, Megatron-LM): clip / (norm + 1e-6), at most 1.
    """
    return jnp.minimum(1.0, clip / (norm + 1e-6)) if clip > 0.0 else jnp.ones_like(norm)


def _update_if(
    finite: jax.Array | None, update: Callable[[T, Params], T], state: T, grads: Params, *, on_cores: bool
) -> T:
    """Return the state after an update, or `state` if not `finite` (None: always updated)."""
    if finite is None:
        return update(state, grads)
    # XLA's CPU backend fuses each result separately, so a select would copy moments that another result still reads;
    # a branch costs nothing there. On accelerators a branch makes the host wait for the gradients, whereas a select is
    # free inside the fused update, which already has both values.
    if on_cores:
        return lax.cond(finite, update, lambda state, grads: state, state, grads)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), state)
