"""Optimizer state on the devices: float32 masters, moments, the weights that layers read, and their update."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from axonn_jax.backend.traits import branches_freely
from axonn_jax.memory.optimizer_traits import owner, updated
from axonn_jax.memory.precision import FULL, Precisions
from axonn_jax.memory.report import Shapes, StateBytes, local_elements, state_bytes
from axonn_jax.memory.zero import whole_weights
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.weight_gather import Weights


class ModelState(NamedTuple):
    """State that an update changes."""

    weights: Weights
    """Weights that layers read: float32, or the compute dtype where masters are kept apart."""
    masters: Params
    """Float32 weights in the optimizer's layout; empty where `weights` are the masters, or with offload. Those of a
    pruned parameter are its kept values, as is its optimizer state."""
    optimizer: Any
    """Optax state, laid out like the masters; with offload one for each bucket, behind the bucket's masters."""


Apply = Callable[[ModelState, Params, jax.Array, jax.Array], tuple[ModelState, jax.Array]]
"""Function (state, gradients, factor, loss) -> the next state, and an array that is ready at the end."""


@dataclass(frozen=True)
class DeviceOptimizer:
    """An optimizer whose state is on the devices, for parameters on one mesh; any optax transformation."""

    optimizer: optax.GradientTransformation
    mesh: Mesh
    shapes: Shapes
    specs: Specs
    """Layouts of the weights."""
    state_specs: Specs
    """Layouts of gradients, masters and optimizer state: the same, or with ZeRO split over `data` too."""
    precisions: Precisions = FULL
    bucket: int = 16_000_000
    """Elements gathered together over `data`, where masters are split over it."""
    forms: PrunedLayout | None = None
    """Layout of the pruned parameters, whose `shapes` are those of the trained values."""

    def start(self, params: Params, extra: Params = {}, *, owned: bool = True) -> ModelState:  # noqa: B006
        """Return the first state of float32 parameters; it takes their arrays over if they are `owned`.

        Of parameters in another form `params` has the trained values, and `extra` the arrays beside these.
        """
        shardings = self.shardings(params)
        if not self._separate:
            return ModelState({**params}, {}, jax.jit(self.optimizer.init, out_shardings=shardings.optimizer)(params))
        state = jax.jit(self._first, out_shardings=shardings)(params, extra)
        if owned:
            jax.tree.map(lambda p: p.delete(), params)
        return state  # type: ignore[no-any-return]

    def after(
        self, state: ModelState, grads: Params, factor: jax.Array, value: jax.Array, finite: jax.Array | None = None
    ) -> ModelState:
        """The state after an update with `factor` times the gradients, in float32; as before where not `finite`.

        None: the host has seen to that. `value` is the loss.

        To be traced. Collectives: where masters are split over `data`, an all-gather of the weights over it, in
        buckets, `(G-1)/G * itemsize * elements` bytes a device.
        """
        own: Any = {name: weight for name, weight in state.weights.items() if name not in state.masters}
        before = (self._as_masters(own) | state.masters, state.optimizer)

        def update(before: Any, grads: Params) -> Any:
            masters, optimizer = before
            # A region over the live axes alone leaves its mesh in the gradients' type. An optimizer that draws noise
            # lays it out by that type, which jax refuses under another mesh.
            layouts = {name: NamedSharding(self.mesh, self.state_specs[name]) for name in grads}
            placed = lax.with_sharding_constraint(grads, layouts)
            grads = {name: grad.astype(jnp.float32) * factor for name, grad in placed.items()}
            updates, optimizer = updated(self.optimizer, grads, optimizer, masters, value)
            return optax.apply_updates(masters, updates), optimizer

        on_cores = branches_freely(self.mesh.devices.flat[0].platform)
        masters, optimizer = _update_if(finite, update, before, grads, on_cores=on_cores)
        return self._from_masters(masters, optimizer, {name: state.weights[name] for name in self._formed})

    def program(self, state: ModelState) -> Apply:
        """The update as a compiled program that uses such a state up."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        done = NamedSharding(self.mesh, P())

        def apply(
            state: ModelState, grads: Params, factor: jax.Array, value: jax.Array
        ) -> tuple[ModelState, jax.Array]:
            return self.after(state, grads, factor, value), jnp.zeros((), jnp.int32)

        # Weights that lie apart from their masters are not read, but leave their place to the new ones.
        return jax.jit(apply, donate_argnums=0, out_shardings=(shardings, done), keep_unused=True)

    def restored(self, masters: Params, optimizer: Any, extra: Params = {}, *, owned: bool = False) -> ModelState:  # noqa: B006
        """Return the state with these float32 weights, laid out as `masters`, and this optimizer state."""
        if not self._separate:
            return ModelState({**masters}, {}, optimizer)

        def make(masters: Params, optimizer: Any, extra: Params) -> ModelState:
            return self._from_masters(masters, optimizer, self._empty(extra))

        return jax.jit(make, out_shardings=self.shardings(masters))(masters, optimizer, extra)  # type: ignore[no-any-return]

    def opt_state(self, state: ModelState) -> Any:
        """The optax state."""
        return state.optimizer

    def masters(self, state: ModelState) -> Params:
        """The float32 weights by name, or their trained values."""
        return {**state.weights, **state.masters}  # type: ignore[dict-item]

    def bytes(self) -> StateBytes:
        """Bytes of one device, by formula."""
        layouts = (self.specs, self.state_specs)
        usual = state_bytes(self.shapes, *layouts, self.mesh, self.precisions, self.optimizer)
        if self.forms is None:
            return usual
        dense, values, apart = (
            local_elements(shapes, specs, self.mesh)
            for shapes, specs in (
                (self.forms.shapes, self.specs),
                (self.forms.value_shapes, self.specs),
                (self.forms.value_shapes, self.state_specs),
            )
        )
        masters = 0 if self.precisions.master_weights else 4 * apart
        weights = usual.weights + (dense - values) * self.precisions.weights.itemsize
        return replace(usual, weights=weights, masters=usual.masters + masters, positions=4 * values)

    def abstract(self) -> ModelState:
        """Shapes and layouts of the state."""
        full: Any = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self.shapes.items()}
        extra = {name: jax.ShapeDtypeStruct(self.shapes[name], jnp.int32) for name in self._formed}
        shapes = jax.eval_shape(self._first, full, extra)

        def laid_out(sharding: NamedSharding, shapes: Any) -> Any:  # several arrays of a weight in another form
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes)

        return jax.tree.map(laid_out, self.shardings(full), shapes)  # type: ignore[no-any-return]

    def shardings(self, params: Params) -> Any:
        """The layout of the state for such parameters, which may be shapes alone."""
        scalar = NamedSharding(self.mesh, P())
        masters = self._shardings(self.state_specs, params)
        optimizer = state_layout(jax.eval_shape(self.optimizer.init, params), params, masters, scalar)
        weights: Any = self._shardings(self.specs, params)
        return ModelState(weights, self._kept(masters), optimizer)

    @property
    def _separate(self) -> bool:
        return self.precisions.master_weights or self.state_specs != self.specs or self.forms is not None

    @property
    def _formed(self) -> Iterable[str]:
        """Names of the parameters in another form."""
        return () if self.forms is None else self.forms.shapes

    def _empty(self, extra: Params) -> Weights:
        """Return weights of the parameters in another form, of no values yet."""
        return {} if self.forms is None else self.forms.first(extra, self.precisions.weights)

    def _first(self, params: Params, extra: Params) -> ModelState:
        masters = self._as_masters(params)
        return self._from_masters(masters, self.optimizer.init(masters), self._empty(extra))

    def _as_masters(self, weights: Params) -> Params:
        if not self._separate:
            return weights
        return jax.tree.map(lax.with_sharding_constraint, weights, self._shardings(self.state_specs, weights))

    def _kept(self, masters: Any) -> Any:
        """Return the masters that are kept apart from the weights."""
        if self.precisions.master_weights:
            return masters
        return {name: masters[name] for name in self._formed}

    def _from_masters(self, masters: Params, optimizer: Any, onto: Weights) -> ModelState:
        """Return the state of masters; values of parameters in another form are written into the weights `onto`."""
        if not self._separate:
            return ModelState({**masters}, {}, optimizer)
        layouts = (self.state_specs, self.specs)
        whole = whole_weights(masters, layouts, self.mesh, self.precisions.weights_of, self.bucket)
        weights: Weights = {**whole}
        if self.forms is not None:
            weights |= self.forms.written(onto, {name: whole[name] for name in onto})
        return ModelState(weights, self._kept(masters), optimizer)

    def _shardings(self, specs: Specs, names: Iterable[str]) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.mesh, specs[name]) for name in names}


def state_layout(state: Any, params: Mapping[str, Any], shardings: Mapping[str, Any], scalar: Any) -> Any:
    """Return the layout of an optax state, its parameter's for a leaf of the parameter's shape, else `scalar`."""

    def layout(path: tuple[Any, ...], leaf: Any) -> Any:
        name = owner(path, params)
        return scalar if name is None or params[name].shape != leaf.shape else shardings[name]

    return tree_map_with_path(layout, state)


def clip_factor(norm: Any, clip: float) -> Any:
    """Return the factor that scales gradients of global norm `norm` to at most `clip`; 1 if `clip` is 0.

    The published coefficient (AxoNN, Megatron-LM): clip / (norm + 1e-6), never above one.
    """
    return jnp.minimum(1.0, clip / (norm + 1e-6)) if clip > 0.0 else jnp.ones_like(norm)


def _update_if(
    finite: jax.Array | None, update: Callable[[Any, Any], Any], state: Any, grads: Any, *, on_cores: bool
) -> Any:
    """The state after an update; the state as it was where not `finite` (None: always updated).

    Accelerators choose number by number, in the fused kernel that has both at hand: a branch would make the host wait
    for the gradients. XLA's CPU backend (`on_cores`) fuses each result by itself, would copy moments that another
    still reads, and takes a branch for nothing.
    """
    if finite is None:
        return update(state, grads)
    if on_cores:
        return lax.cond(finite, update, lambda state, grads: state, state, grads)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state, grads), state)
