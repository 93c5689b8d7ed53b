"""Store of all state of the parameters on one mesh: the one place where it is made, renamed, saved and loaded."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from axonn_jax.checkpoint.naming import MASKS, PARAMS, State, flatten, shapes, unflatten, unflatten_scale
from axonn_jax.memory.host_arrays import PrunedArray, on_device, replicated, unpruned
from axonn_jax.memory.offload import OffloadedOptimizer
from axonn_jax.memory.optimizer_state import Apply, DeviceOptimizer
from axonn_jax.memory.optimizer_traits import owner, with_hyperparams
from axonn_jax.memory.report import all_finite, counted, report
from axonn_jax.models.stacked import Stack
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.pruned.prune import KeptEntries, Pruner
from axonn_jax.state.frozen import FrozenWeights
from axonn_jax.state.scanned import stack_state, unstack_params, unstack_state
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.weight_gather import Weights

Read = Callable[[State], State]
"""Function of shapes, types and layouts by name -> arrays that have these."""


Placement = DeviceOptimizer | OffloadedOptimizer
"""Place of masters and optimizer state: on the devices, or in host memory."""


@dataclass
class ParamPlan:
    """Programs' view of parameters in one form."""

    stack: Stack
    """The model with layers stacked and one by one."""
    placement: Placement
    """Place of masters and optimizer state."""


PlanT = TypeVar("PlanT", bound=ParamPlan)


class ParamStore(Generic[PlanT]):
    """Weights, masters and optimizer state of the parameters on one mesh.

    State has the layers' own names, dense and whole, to everybody but the programs: an array that is held otherwise is
    a `memory.host_arrays.HeldArray`, which `joined` makes an array of.

    Args:
        params: Float32 parameters on the mesh, under the layers' own names; those beside adapters are frozen.
        optimizer: The optimizer, for parameters under these names.
        build: Function of the parameters' forms (None: all are plain arrays) -> what programs read and write them by.
        chooser: Choice of the parameters' forms; None: all are plain arrays.
        formed: True if parameters have the chooser's forms from the start.
        owned: True if `params` may be freed, one after another.
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
        dtype: Any = np.float32,
    ):
        self._optimizer, self._build, self._chooser = optimizer, build, chooser
        chosen: KeptEntries | None = None
        if chooser is not None and formed:
            chosen = chooser.chosen(chooser.masks(params))
            params = chosen.compressed(params, used_up=owned)
        self._begin(chosen)
        frozen = {name: params[name] for name in self.stack.per_layer.frozen}
        self.frozen = FrozenWeights(frozen, self.stack, self.mesh, dtype, owned=owned)
        params = {name: value for name, value in params.items() if name not in frozen}
        params = self.stack.join(params, self.mesh, used_up=owned)
        self.model = self.placement.start(params, self._stacked_extra(chosen), owned=owned)
        """State that an update changes; a step's program uses it up and leaves the next one."""

    def _begin(self, chosen: KeptEntries | None) -> None:
        """Take forms over; nothing is compiled."""
        self.forms = None if chosen is None else chosen.forms
        """Layout of the pruned parameters, by the layers' own names."""
        self.rebuild()

    def rebuild(self) -> None:
        """Call `build` again, for the same forms."""
        self.plan = self._build(self.forms)
        self._apply: Apply | None = None

    @property
    def stack(self) -> Stack:
        """The model with layers stacked and one by one."""
        return self.plan.stack

    @property
    def placement(self) -> Placement:
        """Place of masters and optimizer state."""
        return self.plan.placement

    @property
    def mesh(self) -> Mesh:
        """Mesh of the parameters."""
        return self.placement.mesh

    @property
    def weights(self) -> Weights:
        """The weights that layers read."""
        return {**self.model.weights, **self.frozen.arrays}

    @property
    def averaged(self) -> Weights:
        """The weights that layers read with their averages in place, a copy, of an optimizer made by `averaging`."""
        averages, like = self.placement.opt_state(self.model).average, dict[str, Any](self.model.weights)
        laid = {n: jax.device_put(on_device(v).astype(like[n].dtype), like[n].sharding) for n, v in averages.items()}
        return {**self.weights, **laid}

    @property
    def masters(self) -> Params:
        """The float32 weights that are trained, by the layers' own names."""
        return self._whole(unstack_params(self.stack, self.placement.masters(self.model)))  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> Any:
        """The optax state, with the layers' own names."""
        return self._whole(unstack_state(self._optimizer, self.stack, self.placement.opt_state(self.model)))

    @property
    def prunes(self) -> bool:
        """True if parameters may get another form."""
        return self._chooser is not None

    def finite(self) -> bool:
        """True if weights and optimizer state are finite numbers; waits for them."""
        return all_finite(self.model)

    def memory(self, program: jax.stages.Compiled | None = None) -> dict[str, Any]:
        """Return the bytes of one device: planned, counted, and of the step's `program`; see `memory.report.report`."""
        arrays = counted(jax.tree.leaves((self.model, self.frozen.arrays)), self.mesh.local_devices[0])
        planned = self.placement.bytes()
        return report(replace(planned, weights=planned.weights + self.frozen.bytes), arrays, self.mesh, program)

    def apply(self, grads: Params, factor: float, loss: float) -> jax.Array:
        """Start an update with `factor` times the gradients; return an array that is ready when it has run."""
        if self._apply is None:
            self._apply = self.placement.program(self.model)
        numbers = (replicated(np.float32(number), NamedSharding(self.mesh, P())) for number in (factor, loss))
        self.model, done = self._apply(self.model, grads, *numbers)
        return done

    def set(self, numbers: Mapping[str, float]) -> None:
        """Replace numbers of the optimizer, by `with_hyperparams`."""
        self.model = self.model._replace(optimizer=with_hyperparams(self.model.optimizer, numbers))

    def named(self, scale: Any) -> State:
        """Return the state under the names of checkpoints, with that of the loss scale; nothing is copied."""
        state = flatten(self.masters, self.opt_state, scale)
        if self.forms is not None:
            state |= {MASKS + name: unpruned(self.forms, name, index) for name, index in self._extra.items()}
        return state

    def shapes(self, scale: Any) -> State:
        """Return shapes of the state under the names of checkpoints."""
        return state_shapes(self._like, self._optimizer, scale, () if self.forms is None else self.forms.shapes)

    def load(self, read: Read, wanted: Callable[[str], bool], scale: Any) -> Any:
        """Replace the state whose names are `wanted` by that which `read` makes; return the loss scale's.

        The old arrays are freed first, so that the devices never hold two copies.
        """
        state, chosen = self.named(scale), None
        if self.forms is None:
            state = _read_anew(state, read, wanted)
        else:
            assert self._chooser is not None
            state, chosen = _read_compressed(state, read, wanted, self._chooser)
        params, optimizer = unflatten(state, self._like, jax.eval_shape(self._optimizer.init, self._like))
        self._take_over(params, optimizer, chosen)
        return unflatten_scale(state, scale)

    def masks(self) -> Params:
        """Return masks of the entries that would be trained, by the present weights and the chooser."""
        assert self._chooser is not None
        masters = self.masters
        return self._chooser.masks({name: on_device(masters[name]) for name in self._chooser.names})

    def reform(self) -> None:
        """Give the parameters, which are plain arrays, the forms that `masks` ask for."""
        assert self._chooser is not None
        chosen = self._chooser.chosen(self.masks())

        def compressed(path: Any, leaf: Any) -> Any:  # one array after another, each used up
            name = owner(path, chosen.extra)
            if name is None or not leaf.shape:
                return leaf
            return chosen.compressed({name: on_device(leaf)}, used_up=True)[name]

        params, optimizer = tree_map_with_path(compressed, (self.masters, self.opt_state))
        self._take_over(params, optimizer, chosen)

    def _take_over(self, params: Params, optimizer: Any, chosen: KeptEntries | None) -> None:
        """Replace the state by weights and an optax state under the layers' own names, in the forms `chosen`."""
        if chosen is not None:
            self._begin(chosen)
        masters = self.stack.join(params, self.mesh, used_up=True)
        if self.stack.own:
            assert isinstance(self.placement, DeviceOptimizer)  # no scanned layer's state is offloaded
            optimizer = stack_state(self.stack, optimizer, self.placement.abstract().optimizer, used_up=True)
        self.model = self.placement.restored(masters, optimizer, self._stacked_extra(chosen), owned=True)

    @property
    def _like(self) -> Any:
        """Shapes of the dense float32 weights that are trained, under the layers' own names."""
        return {name: jax.ShapeDtypeStruct(p.shape, np.float32) for name, p in self.stack.per_layer.trained.items()}

    @property
    def _extra(self) -> Mapping[str, Any]:
        """Extra arrays of the parameters in another form, by the layers' own names."""
        assert self.forms is not None
        return unstack_params(self.stack, self.forms.over_layers(self.stack.own).extra(self.model.weights))

    def _stacked_extra(self, chosen: KeptEntries | None) -> Params:
        return {} if chosen is None else self.stack.join(chosen.extra, self.mesh, used_up=True)

    def _whole(self, tree: Any) -> Any:
        """Return a tree of state by parameter with a `PrunedArray` for each array of values; nothing is copied."""
        if (forms := self.forms) is None:
            return tree
        extra = self._extra

        def whole(path: Any, leaf: Any) -> Any:
            name = owner(path, forms.shapes)
            return leaf if name is None or not leaf.shape else unpruned(forms, name, extra[name], leaf)

        return tree_map_with_path(whole, tree)


def state_shapes(
    params: Mapping[str, Any], optimizer: optax.GradientTransformation, scale: Any, masked: Iterable[str] = ()
) -> State:
    """Return shapes of state under the names of checkpoints: of parameters, of an optimizer's, and of masks."""
    state = flatten(params, jax.eval_shape(optimizer.init, params), scale)
    return state | {MASKS + name: params[name] for name in masked}


def _read_anew(state: State, read: Read, wanted: Callable[[str], bool]) -> State:
    """Return a state whose wanted arrays are freed, then made by `read`."""
    asked = shapes({name: value for name, value in state.items() if wanted(name)})
    for name in asked:
        state[name].delete()
    return {**state, **read(asked)}


def _read_compressed(
    state: State, read: Read, wanted: Callable[[str], bool], chooser: Pruner
) -> tuple[State, KeptEntries]:
    """Free the wanted arrays of a state, read and compress them one by one; return the state and its forms.

    Masks are those read, or else made of the weights by the chooser, for which all weights are on the devices at once.
    Of the other arrays the trained values stay.
    """
    asked = shapes({name: value for name, value in state.items() if wanted(name)})
    for name in asked:
        state[name].delete()
    read_before: State = {}

    def one(name: str) -> jax.Array:
        return read_before.pop(name) if name in read_before else read({name: asked[name]})[name]

    compressed = {name: value for name, value in state.items() if isinstance(value, PrunedArray)}
    masked = [name for name in asked if name.startswith(MASKS)]
    if masked:
        masks = {name.removeprefix(MASKS): one(name).astype(bool) for name in masked}
    else:
        dense = {}
        for name in (name for name in compressed if name.startswith(PARAMS)):
            read_before[name] = one(name) if name in asked else state[name].joined()
            dense[name.removeprefix(PARAMS)] = read_before[name]
        masks = chooser.masks(dense)
        dense.clear()
    chosen = chooser.chosen(masks)
    new = read({name: want for name, want in asked.items() if name not in compressed})
    for name, value in compressed.items():
        if not name.startswith(MASKS):
            dense_array = one(name) if name in asked or name in read_before else value.joined()
            new |= {name: chosen.compressed({value.name: dense_array}, used_up=True)[value.name]}
    return {name: new.get(name, value) for name, value in state.items() if not name.startswith(MASKS)}, chosen
