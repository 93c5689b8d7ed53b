"""Parameter store: creates, renames, saves and loads all state of the parameters on one mesh."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from axonn_jax.core.checkpoint.naming import MASKS, PARAMS, State, flatten, shapes, unflatten, unflatten_scale
from axonn_jax.core.memory.host_arrays import LazyArray, PrunedArray, on_device, replicated, unpruned
from axonn_jax.core.memory.offload import OffloadedOptimizer
from axonn_jax.core.memory.optimizer_state import Apply, DeviceOptimizer
from axonn_jax.core.memory.optimizer_traits import Arrays, owner, with_hyperparams
from axonn_jax.core.memory.precision import Scale
from axonn_jax.core.memory.report import all_finite, counted, report
from axonn_jax.core.models.stacked import Stack
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.prune import KeptEntries, Pruner
from axonn_jax.core.state.frozen import FrozenWeights
from axonn_jax.core.state.scanned import stack_state, unstack_params, unstack_state
from axonn_jax.core.tensor.params import Params
from axonn_jax.core.tensor.weight_gather import Weights

Read = Callable[[State], State]
"""Function from abstract arrays (shape, dtype, sharding) by name to arrays that match them."""

Placement = DeviceOptimizer | OffloadedOptimizer
"""Owner of master weights and optimizer state, which keeps them on the devices or in host memory."""


@dataclass
class ParamPlan:
    """Parameters as the compiled programs see them, for one choice of pruned and dense arrays."""

    stack: Stack
    """Model with its layers both stacked and separate."""
    placement: Placement
    """Owner of master weights and optimizer state."""


PlanT = TypeVar("PlanT", bound=ParamPlan)


class ParamStore(Generic[PlanT]):
    """Weights, master weights and optimizer state of the parameters on one mesh.

    Everything outside the compiled programs sees dense, unstacked arrays under per-layer names. An array stored in any
    other form is exposed as a `memory.host_arrays.LazyArray`, which `materialize` assembles.

    Args:
        params: Float32 parameters on the mesh, under per-layer names. With adapters, the base weights are frozen.
        optimizer: Optimizer for parameters under these names.
        build: Builds the plan from the layout of the pruned parameters (None: all are dense).
        chooser: Selects the entries that pruned parameters keep; None: all are dense.
        formed: True if the parameters are pruned from the start.
        owned: True if `params` may be freed, one array after another.
        dtype: Dtype of frozen weights.
    """

    def __init__(
        self,
        params: Params,
        optimizer: optax.GradientTransformation,
        build: Callable[[PrunedLayout | None], PlanT],
        chooser: Pruner | None = None,
        *,
        formed: bool = True,
        owned: bool = True,
        dtype: jax.typing.DTypeLike = np.float32,
    ):
        self._optimizer, self._build, self._chooser = optimizer, build, chooser
        selection: KeptEntries | None = None
        if chooser is not None and formed:
            selection = chooser.select(chooser.masks(params))
            params = selection.compressed(params, used_up=owned)
        self._begin(selection)
        frozen = {name: params[name] for name in self.stack.per_layer.frozen}
        self.frozen = FrozenWeights(frozen, self.stack, self.mesh, dtype, owned=owned)
        params = {name: value for name, value in params.items() if name not in frozen}
        params = self.stack.join(params, self.mesh, used_up=owned)
        self.model = self.placement.start(params, self._stacked_extra(selection), owned=owned)
        """State that an update changes; each step's program donates it and returns the next one."""

    def _begin(self, selection: KeptEntries | None) -> None:
        self.forms = None if selection is None else selection.forms
        """Layout of the pruned parameters, under per-layer names."""
        self.rebuild()

    def rebuild(self) -> None:
        """Build the plan again for the same layout of pruned parameters; compiles nothing."""
        self.plan = self._build(self.forms)
        self._apply: Apply | None = None

    @property
    def stack(self) -> Stack:
        """`ParamPlan.stack` of the current plan."""
        return self.plan.stack

    @property
    def placement(self) -> Placement:
        """`ParamPlan.placement` of the current plan."""
        return self.plan.placement

    @property
    def mesh(self) -> Mesh:
        """Mesh of the parameters."""
        return self.placement.mesh

    @property
    def weights(self) -> Weights:
        """Weights that layers read, trained and frozen."""
        return {**self.model.weights, **self.frozen.arrays}

    @property
    def averaged(self) -> Weights:
        """Weights that layers read, replaced by copies of their averages; the optimizer must come from `averaging`."""
        averages, weights = self.placement.opt_state(self.model).average, dict[str, Any](self.model.weights)
        # Averages have the optimizer's dtype and layout; the compiled evaluation takes those of the weights.
        copies = {
            name: jax.device_put(on_device(average).astype(weights[name].dtype), weights[name].sharding)
            for name, average in averages.items()
        }
        return {**self.weights, **copies}

    @property
    def masters(self) -> Params:
        """Trained float32 weights, under per-layer names."""
        return self._dense(unstack_params(self.stack, self.placement.masters(self.model)))  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> optax.OptState:
        """The optax state, under per-layer names."""
        return self._dense(unstack_state(self._optimizer, self.stack, self.placement.opt_state(self.model)))

    @property
    def prunes(self) -> bool:
        """True if parameters are pruned, now or later."""
        return self._chooser is not None

    def finite(self) -> bool:
        """True if weights and optimizer state are finite numbers; waits for them."""
        return all_finite(self.model)

    def memory(self, program: jax.stages.Compiled | None = None) -> dict[str, Any]:
        """Return bytes per device: planned, counted, and of the step's `program`; see `memory.report.report`."""
        arrays = counted(jax.tree.leaves((self.model, self.frozen.arrays)), self.mesh.local_devices[0])
        planned = self.placement.bytes()
        return report(replace(planned, weights=planned.weights + self.frozen.bytes), arrays, self.mesh, program)

    def apply(self, grads: Params, factor: float, loss: float) -> jax.Array:
        """Dispatch an update with `factor` times the gradients; return an array that is ready once it has run."""
        if self._apply is None:
            self._apply = self.placement.program(self.model)
        # Scalars on the mesh, since a host number is no argument of a program on devices of several processes.
        scalars = (replicated(np.float32(number), NamedSharding(self.mesh, P())) for number in (factor, loss))
        self.model, done = self._apply(self.model, grads, *scalars)
        return done

    def set(self, numbers: Mapping[str, float]) -> None:
        """Replace injected hyperparameters of the optimizer; see `with_hyperparams`."""
        self.model = self.model._replace(optimizer=with_hyperparams(self.model.optimizer, numbers))

    def checkpoint_state(self, scale: Scale) -> State:
        """Return the state and the loss scale under their checkpoint names, without copying arrays."""
        state = flatten(self.masters, self.opt_state, scale)
        if self.forms is not None:
            state |= {MASKS + name: unpruned(self.forms, name, index) for name, index in self._extra.items()}
        return state

    def shapes(self, scale: Scale) -> State:
        """Return abstract arrays of the state under their checkpoint names."""
        return state_shapes(self._abstract_params, self._optimizer, scale, self.forms.shapes if self.forms else ())

    def load(self, read: Read, should_load: Callable[[str], bool], scale: Scale) -> Scale:
        """Replace the arrays whose names pass `should_load` by those `read` returns; return the new loss scale.

        The old arrays are freed first, so that the devices never hold two copies.
        """
        state, selection = self.checkpoint_state(scale), None
        if self.forms is None:
            state = _read_anew(state, read, should_load)
        else:
            assert self._chooser is not None
            state, selection = _read_compressed(state, read, should_load, self._chooser)
        abstract = self._abstract_params
        params, optimizer = unflatten(state, abstract, jax.eval_shape(self._optimizer.init, abstract))
        self._take_over(params, optimizer, selection)
        return unflatten_scale(state, scale)

    def masks(self) -> Params:
        """Return masks of the entries the chooser would keep for the current weights."""
        assert self._chooser is not None
        masters = self.masters
        return self._chooser.masks({name: on_device(masters[name]) for name in self._chooser.names})

    def reform(self) -> None:
        """Prune the dense parameters and their optimizer state by `masks`."""
        assert self._chooser is not None
        selection = self._chooser.select(self.masks())

        # One array at a time, freeing each, so that only one of them is held both dense and compressed.
        def compress(path: tuple[object, ...], leaf: jax.Array) -> jax.Array | LazyArray:
            name = owner(path, selection.extra)
            if name is None or not leaf.shape:
                return leaf
            return selection.compressed({name: on_device(leaf)}, used_up=True)[name]

        params, optimizer = tree_map_with_path(compress, (self.masters, self.opt_state))
        self._take_over(params, optimizer, selection)

    def _take_over(self, params: Params, optimizer: optax.OptState, selection: KeptEntries | None) -> None:
        if selection is not None:
            self._begin(selection)
        masters = self.stack.join(params, self.mesh, used_up=True)
        if self.stack.layer_names:
            assert isinstance(self.placement, DeviceOptimizer)  # no scanned layer's state is offloaded
            optimizer = stack_state(self.stack, optimizer, self.placement.abstract().optimizer, used_up=True)
        self.model = self.placement.restored(masters, optimizer, self._stacked_extra(selection), owned=True)

    @property
    def _abstract_params(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(p.shape, np.float32) for name, p in self.stack.per_layer.trained.items()}

    @property
    def _extra(self) -> Mapping[str, jax.Array | LazyArray]:
        """Index arrays of the pruned parameters, under per-layer names."""
        assert self.forms is not None
        return unstack_params(self.stack, self.forms.over_layers(self.stack.layer_names).extra(self.model.weights))

    def _stacked_extra(self, selection: KeptEntries | None) -> Params:
        return {} if selection is None else self.stack.join(selection.extra, self.mesh, used_up=True)

    def _dense(self, tree: Any) -> Any:
        """Wrap the values of pruned parameters in a tree as `PrunedArray`s, without copying arrays."""
        if (forms := self.forms) is None:
            return tree
        extra = self._extra

        def dense_leaf(path: tuple[object, ...], leaf: jax.Array) -> jax.Array | LazyArray:
            name = owner(path, forms.shapes)
            return leaf if name is None or not leaf.shape else unpruned(forms, name, extra[name], leaf)

        return tree_map_with_path(dense_leaf, tree)


def state_shapes(
    params: Arrays, optimizer: optax.GradientTransformation, scale: Scale, masked: Iterable[str] = ()
) -> State:
    """Return abstract parameters, optimizer state, loss scale and masks under their checkpoint names."""
    state = flatten(params, jax.eval_shape(optimizer.init, params), scale)
    return state | {MASKS + name: params[name] for name in masked}


def _read_anew(state: State, read: Read, should_load: Callable[[str], bool]) -> State:
    abstract = shapes({name: value for name, value in state.items() if should_load(name)})
    # Free before reading, so that the devices never hold two copies.
    for name in abstract:
        state[name].delete()
    return {**state, **read(abstract)}


def _read_compressed(
    state: State, read: Read, should_load: Callable[[str], bool], chooser: Pruner
) -> tuple[State, KeptEntries]:
    """Free the arrays to load, then read and compress them one by one; return the state and its kept entries.

    Masks that are not read come from the chooser, for which all weights are on the devices at once.
    """
    abstract = shapes({name: value for name, value in state.items() if should_load(name)})
    for name in abstract:
        state[name].delete()
    prefetched: State = {}

    def read_array(name: str) -> jax.Array:
        return prefetched.pop(name) if name in prefetched else read({name: abstract[name]})[name]

    compressed = {name: value for name, value in state.items() if isinstance(value, PrunedArray)}
    # The masks decide which entries of every other array are kept, so they come first.
    masked = [name for name in abstract if name.startswith(MASKS)]
    if masked:
        masks = {name.removeprefix(MASKS): read_array(name).astype(bool) for name in masked}
    else:
        dense = {}
        for name in (name for name in compressed if name.startswith(PARAMS)):
            prefetched[name] = read_array(name) if name in abstract else state[name].materialize()
            dense[name.removeprefix(PARAMS)] = prefetched[name]
        masks = chooser.masks(dense)
        dense.clear()
    selection = chooser.select(masks)
    new = read({name: target for name, target in abstract.items() if name not in compressed})
    for name, value in compressed.items():
        if not name.startswith(MASKS):
            dense_array = read_array(name) if name in abstract or name in prefetched else value.materialize()
            new |= {name: selection.compressed({value.name: dense_array}, used_up=True)[value.name]}
    return {name: new.get(name, value) for name, value in state.items() if not name.startswith(MASKS)}, selection
