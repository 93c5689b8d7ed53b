"""Optimizer state in host memory, streamed through the device a bucket at a time (AxoNN, IPDPS 22, section on memory).

On the device stay the weights and the gradients. Master weights and moments are on the host, with the layout that they
would have on the devices. While bucket k is updated, k+1 is on its way to the device and k-1 on its way back, so at
most three are on the device. A bucket's old state is freed when the new one takes its place. Buckets for which the
devices have room stay there.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from axonn_jax.distributed.gpu_limits import check_pinned
from axonn_jax.memory.buckets import fitting
from axonn_jax.memory.host_arrays import HOST, CutArray, cut, joined, on_host, settle, stays, stream, transferred
from axonn_jax.memory.offload_buckets import Bucket, BucketPrograms, UpdateForm, plan_updates
from axonn_jax.memory.optimizer_state import Apply, DeviceOptimizer, ModelState
from axonn_jax.memory.optimizer_traits import check_offload, owner, treatments
from axonn_jax.memory.report import StateBytes, room
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.weight_gather import Weights


class OffloadedOptimizer:
    """Optimizer with its state in host memory, with the methods of `DeviceOptimizer`.

    The optimizer treats parameters one by one; an elementwise one cuts parameters larger than a bucket (in elements of
    a device). Where weights are not float32, float32 masters are part of the state. Parameters that are `shared` with
    other meshes have buckets of their own, so that all update them by the same program. Buckets of at most `resident`
    bytes a device stay on the devices; None: of `report.room` after the first update. `progress` is told of every
    bucket. Raises ``UserError`` where the optimizer looks at all parameters together.
    """

    def __init__(
        self,
        on_devices: DeviceOptimizer,
        *,
        resident: int | None = 0,
        shared: Collection[str] = (),
        progress: Callable[[str], None] = lambda what: None,
    ):
        optimizer, mesh, precisions = on_devices.optimizer, on_devices.mesh, on_devices.precisions
        shapes, specs, state_specs = on_devices.shapes, on_devices.specs, on_devices.state_specs
        self._on_devices, self.mesh, self._precisions = on_devices, mesh, precisions
        self._shapes, self._progress = dict(shapes), progress
        abstract = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        self._placed = {name: on_host(NamedSharding(mesh, state_specs[name])) for name in shapes}
        # What elementwise optimizers do may depend on the name and the number of dims alone.
        small = {name: jax.ShapeDtypeStruct((2,) * len(p.shape), p.dtype) for name, p in abstract.items()}
        treated = treatments(optimizer, small)
        one = {number: name for name, number in treated.items()}
        each = {name: abstract[name] for name in one.values()}
        elementwise = check_offload(optimizer, "memory.offload = optimizer", each)
        if not elementwise:
            treated = treatments(optimizer, abstract)
        forms = {
            name: UpdateForm(
                self._placed[name].shard_shape(shape),
                specs[name],
                state_specs[name],
                treated[name],
                precisions.weights_of(name),
            )
            for name, shape in self._shapes.items()
        }
        self.buckets = plan_updates(forms, on_devices.bucket, shared, cut=elementwise)
        self._numbers: dict[str, list[int]] = {}
        for number, planned in enumerate(self.buckets):
            for name in planned.names:
                self._numbers.setdefault(name, []).append(number)
        self.programs = BucketPrograms(optimizer, mesh, precisions)
        self._sizes = [self.programs.state_bytes(bucket) for bucket in self.buckets]
        self._undecided, self._staying = resident is None, fitting(self._sizes, resident or 0)

    def bytes(self) -> StateBytes:
        """Return the bytes of one device and its host, by formula; three further buckets of state are on the device.

        The bytes on the host are those that travel each way in an update.
        """
        resident = sum(self._sizes[number] for number in self._staying)
        usual = replace(self._on_devices.bytes(), offloaded=True, resident=resident)
        # Float32 weights are their own masters, in other forms too, whose values are taken out for an update.
        return usual if self._precisions.master_weights else replace(usual, masters=0)

    @property
    def state_specs(self) -> Specs:
        """Layouts of gradients, masters and optimizer state."""
        return self._on_devices.state_specs

    def start(self, params: Params, extra: Params = {}, *, owned: bool = True) -> ModelState:  # noqa: B006
        """Return the first state of float32 parameters; parameters that are `owned` are freed as they are used."""
        check_pinned(self.bytes().host, self.mesh.local_devices)
        params, weights = dict(params), {}
        states: list[Any] = []
        for number, bucket in enumerate(self.buckets):
            self._progress(f"the first optimizer state, bucket {number + 1} of {len(self.buckets)}")
            first = self.programs.first(bucket, [params[name] for name in bucket.names])
            states.append(first if number in self._staying else transferred(first, HOST))
            for name in bucket.names:
                if self._numbers[name][-1] == number:
                    value = params.pop(name)
                    dtype = self._precisions.weights_of(name)
                    weights[name] = value.astype(dtype)
                    if dtype != value.dtype and owned:
                        value.delete()
        return self._state({name: weights[name] for name in self._shapes}, states, self._empty(extra))

    def after(
        self, model: ModelState, grads: Params, factor: Any, value: Any, finite: Any
    ) -> tuple[ModelState, jax.Array]:
        """Return the state after an update, as `DeviceOptimizer.after`; `model` is used up.

        Also returns an array that is ready when all has run. Moves every state byte on the host to the device and back.
        Collectives: with ZeRO an all-gather of the new weights over `data`, a bucket at a time, `(G-1)/G * itemsize *
        elements` bytes a device; where the optimizer is not elementwise, its own collectives on sharded parameters.
        """
        weights, grads = self._values(model), dict(grads)
        done: Any = None

        def update(number: int, state: Any) -> Any:
            nonlocal done
            bucket, own = self._begin(number, weights)
            taken = self._take(grads, number)
            new, state, done, _ = self.programs.update(bucket, own, state, taken, factor, value, finite)
            weights.update(zip(bucket.names, new, strict=True))
            return state

        self._stream(model.optimizer, update)
        return self._state(weights, model.optimizer, self._formed(model)), done

    def reducing(self, model: ModelState, sums: Params, value: Any, finite: jax.Array) -> tuple[ModelState, jax.Array]:
        """Return the state after an update by unreduced sums of gradients, and the gradients' global norm.

        `sums` are laid out by `unreduced_spec`; state is not split over `data`. Collectives: those of
        `reduce_gradients`, a bucket's in one program with the update of the one before, neither waiting for the other.
        """
        weights, sums = self._values(model), dict(sums)
        row = self.programs.reduce(self.buckets[0], self._take(sums, 0))

        def update(number: int, state: Any) -> Any:
            nonlocal row
            bucket, own = self._begin(number, weights)
            last = number + 1 == len(self.buckets)
            following = None if last else (self.buckets[number + 1], self._take(sums, number + 1))
            new, state, _, row = self.programs.update(
                bucket, own, state, row, np.float32(1.0), value, finite, following
            )
            weights.update(zip(bucket.names, new, strict=True))
            return state

        self._stream(model.optimizer, update)
        return self._state(weights, model.optimizer, self._formed(model)), _norm(row[1], finite)

    def program(self, state: ModelState) -> Apply:
        """Return a function like `DeviceOptimizer.program`'s; the host streams, as it must wait for room on the
        devices."""
        return lambda state, grads, factor, value: self.after(state, grads, factor, value, np.bool_(True))

    def restored(
        self,
        masters: Params,
        optimizer: Any,
        extra: Params = {},  # noqa: B006
        *,
        owned: bool = False,
    ) -> ModelState:
        """Return the state with these float32 weights and optax state, in the form of `masters` and `opt_state`.

        Arrays that are to be cut are freed one after another where they are `owned`.
        """
        weights = {}
        for name, value in masters.items():  # one by one, as cut arrays are copied
            weight = jax.device_put(joined(value), NamedSharding(self.mesh, self._on_devices.specs[name]))
            weights[name] = weight.astype(self._precisions.weights_of(name))
        leaves = tree_leaves_with_path((masters if self._precisions.master_weights else {}, optimizer))
        parts = {path: self._parts(path, leaf, owned) for path, leaf in leaves}  # a `CutArray` is a leaf

        def part(bucket: Bucket) -> Any:
            def find(path: Any, _: Any) -> Any:
                of_leaf = parts[path]
                leaf = of_leaf[bucket.part if len(of_leaf) > 1 else 0]
                return leaf if leaf.ndim else transferred(leaf, "device")  # each bucket uses its numbers up

            return tree_map_with_path(find, self.programs.abstract_state(bucket.abstract(self.mesh)))

        states = [part(bucket) for bucket in self.buckets]
        settle(states, self._staying)
        return self._state(weights, states, self._empty(extra))

    def opt_state(self, model: ModelState) -> Any:
        """Return the optax state, its arrays in host memory; an array that is cut is a `CutArray`."""
        return self._by_parameter(model)[1]

    def masters(self, model: ModelState) -> Params:
        """The float32 weights by name, in host memory, `CutArray` where cut; weights that are float32 themselves."""
        return self._by_parameter(model)[0] if self._precisions.master_weights else self._values(model)

    def _stream(self, states: list[Any], update: Callable[[int, Any], Any]) -> None:
        """Update all states; behind the first update decide which stay on the devices, if that is undecided."""
        self._staying = {number for number, state in enumerate(states) if stays(state)}
        stream(states, update, self._staying)
        if self._undecided and not self._staying:
            jax.block_until_ready(states)
            self._staying = fitting(self._sizes, room(self.mesh))
            settle(states, self._staying)
        self._undecided = False

    def _values(self, model: ModelState) -> Params:
        """Return the weights that are updated: of parameters in another form the trained values, in new arrays."""
        formed = self._formed(model)
        plain: Any = {name: weight for name, weight in model.weights.items() if name not in formed}
        return plain if self._on_devices.forms is None else plain | _values(self._on_devices.forms, formed)

    def _formed(self, model: ModelState) -> Weights:
        """Return the weights of the parameters in another form."""
        forms = self._on_devices.forms
        return {} if forms is None else {name: model.weights[name] for name in forms.shapes}

    def _empty(self, extra: Params) -> Weights:
        """Return weights of the parameters in another form, of no values yet."""
        forms = self._on_devices.forms
        return {} if forms is None else _first(forms, self._precisions.weights, extra)

    def _state(self, weights: Params, optimizer: Any, onto: Weights) -> ModelState:
        """Return the state of the buckets' weights; values of parameters in another form are written into `onto`."""
        forms = self._on_devices.forms
        if forms is None:
            return ModelState({**weights}, {}, optimizer)
        written = _written(forms, onto, {name: weights[name] for name in onto})
        return ModelState({**weights, **written}, {}, optimizer)

    def _by_parameter(self, model: ModelState) -> tuple[Params, Any]:
        leaves = [dict(tree_leaves_with_path(state)) for state in model.optimizer]

        def find(path: Any, want: Any) -> Any:
            name = owner(path, self._shapes)
            numbers = [0] if name is None else self._numbers[name]
            if name is None or len(numbers) == 1 or want.shape != self._shapes[name]:
                return leaves[numbers[0]][path]
            parts = tuple(leaves[number][path] for number in numbers)
            return CutArray(parts, want.shape, self._placed[name], self.buckets[numbers[0]].dim)

        full = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes.items()}
        return tree_map_with_path(find, self.programs.abstract_state(full))  # type: ignore[no-any-return]

    def _parts(self, path: Any, array: Any, owned: bool) -> list[Any]:
        name = owner(path, self._shapes)
        if isinstance(array, CutArray):
            return list(array.parts)
        if name is None or array.shape != self._shapes[name]:
            return [transferred(array, HOST)]
        if array.sharding != self._placed[name]:
            array = jax.device_put(array, self._placed[name])
        buckets = [self.buckets[number] for number in self._numbers[name]]
        if len(buckets) == 1:
            return [array]
        parts = [cut(array, bucket.dim, bucket.start, bucket.rows or 0) for bucket in buckets]
        if owned:
            array.delete()
        return parts

    def _begin(self, number: int, weights: Params) -> tuple[Bucket, list[jax.Array]]:
        self._progress(f"the update, bucket {number + 1} of {len(self.buckets)}")
        bucket = self.buckets[number]
        return bucket, [weights[name] for name in bucket.names]

    def _take(self, grads: Params, number: int) -> list[jax.Array]:
        """Take a bucket's gradients, and drop gradients that no later bucket needs."""
        names = self.buckets[number].names
        return [grads.pop(name) if self._numbers[name][-1] == number else grads[name] for name in names]


@partial(jax.jit, static_argnums=0)
def _values(forms: PrunedLayout, weights: Weights) -> Params:
    return forms.values(weights)


@partial(jax.jit, static_argnums=(0, 1))
def _first(forms: PrunedLayout, dtype: jnp.dtype, extra: Params) -> Weights:
    return forms.first(extra, dtype)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _written(forms: PrunedLayout, weights: Weights, values: Params) -> Weights:
    return forms.written(weights, values)


@jax.jit
def _norm(squares: jax.Array, finite: jax.Array) -> jax.Array:
    return jnp.where(finite, jnp.sqrt(jnp.sum(squares)), jnp.inf)
