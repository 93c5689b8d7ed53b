"""Optimizer state in host memory, streamed through the device a bucket at a time (AxoNN, IPDPS 22, section on memory).

Weights and gradients stay on the device. Master weights and moments are on the host, laid out as they would be on the
devices. While bucket k is updated, k+1 is being copied to the device and k-1 back to the host, so at most three are on
the device. A bucket's old state is freed when the new one replaces it. Buckets that fit stay on the devices.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from axonn_jax.core.distributed.gpu_limits import check_pinned
from axonn_jax.core.memory.buckets import fitting
from axonn_jax.core.memory.host_arrays import CutArray, cut, materialize, on_host, settle, stays, stream, transferred
from axonn_jax.core.memory.offload_buckets import Bucket, BucketPrograms, UpdateForm, plan_updates
from axonn_jax.core.memory.optimizer_state import Apply, DeviceOptimizer, ModelState
from axonn_jax.core.memory.optimizer_traits import check_offload, owner, treatments
from axonn_jax.core.memory.report import StateBytes, room
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.weight_gather import Weights


class OffloadedOptimizer:
    """Optimizer with its state in host memory and the interface of `DeviceOptimizer`.

    If the optimizer is elementwise, parameters with more elements per device than a bucket are cut. Unless weights are
    float32, the state includes float32 master weights.

    Args:
        on_devices: The optimizer as it would run without offload.
        resident: Bytes per device of buckets that stay on the devices; None: `report.room` after the first update.
        shared: Parameters on other meshes too; each has a separate bucket, so that all meshes run the same program.
        progress: Called with a line of text before each bucket.

    Raises:
        UserError: The optimizer looks at all parameters together.
    """

    def __init__(
        self,
        on_devices: DeviceOptimizer,
        *,
        resident: int | None = 0,
        shared: Collection[str] = (),
        progress: Callable[[str], None] = lambda text: None,
    ):
        optimizer, mesh, precisions = on_devices.optimizer, on_devices.mesh, on_devices.precisions
        shapes, specs, state_specs = on_devices.shapes, on_devices.specs, on_devices.state_specs
        self._on_devices, self.mesh, self._precisions = on_devices, mesh, precisions
        self._shapes, self._progress = dict(shapes), progress
        abstract = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        self._host_shardings = {name: on_host(NamedSharding(mesh, state_specs[name])) for name in shapes}
        # Tiny shapes are enough for an elementwise optimizer: it may only depend on names and numbers of dims.
        small = {name: jax.ShapeDtypeStruct((2,) * len(p.shape), p.dtype) for name, p in abstract.items()}
        treated = treatments(optimizer, small)
        representatives = {number: name for name, number in treated.items()}
        probes = {name: abstract[name] for name in representatives.values()}
        elementwise = check_offload(optimizer, "memory.offload = optimizer", probes)
        if not elementwise:
            treated = treatments(optimizer, abstract)
        forms = {
            name: UpdateForm(
                self._host_shardings[name].shard_shape(shape),
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
        """Return bytes per device by formula, without the up to three buckets of state that are being streamed.

        An update moves the host's bytes once in each direction.
        """
        resident = sum(self._sizes[number] for number in self._staying)
        on_devices = replace(self._on_devices.bytes(), offloaded=True, resident=resident)
        # Float32 weights are their own masters. This holds for pruned ones too: an update extracts their values.
        return on_devices if self._precisions.master_weights else replace(on_devices, masters=0)

    @property
    def state_specs(self) -> Specs:
        """Layouts of gradients, masters and optimizer state."""
        return self._on_devices.state_specs

    def start(self, params: Params, extra: Params = {}, *, owned: bool = True) -> ModelState:  # noqa: B006
        """Return the initial state of float32 parameters, freeing each as it is used if they are `owned`."""
        # Refuse before the first allocation; past XLA's limit on pinned memory the run would fail halfway.
        check_pinned(self.bytes().host, self.mesh.local_devices)
        params, weights = dict(params), {}
        states: list[optax.OptState] = []
        for number, bucket in enumerate(self.buckets):
            self._progress(f"the first optimizer state, bucket {number + 1} of {len(self.buckets)}")
            first = self.programs.first(bucket, [params[name] for name in bucket.names])
            states.append(first if number in self._staying else transferred(first))
            for name in bucket.names:
                if self._numbers[name][-1] == number:
                    value = params.pop(name)
                    weights[name] = value.astype(self._precisions.weights_of(name))
                    if weights[name].dtype != value.dtype and owned:
                        value.delete()
        return self._state({name: weights[name] for name in self._shapes}, states, self._empty(extra))

    def apply_update(
        self, model: ModelState, grads: Params, factor: jax.Array, value: jax.Array, finite: jax.Array | np.bool
    ) -> tuple[ModelState, jax.Array]:
        """Return the updated state, as `DeviceOptimizer.apply_update` does, and an array that is ready once it ran.

        Donates `model`. Moves every byte of state on the host to the device and back. Collectives: with ZeRO, an
        all-gather of the new weights over `data` per bucket, `(G-1)/G * itemsize * elements` bytes per device; if the
        optimizer is not elementwise, its own collectives on sharded parameters.
        """
        weights, grads = self._values(model), dict(grads)
        done: Any = None

        def update(number: int, state: optax.OptState) -> optax.OptState:
            nonlocal done
            bucket, old = self._begin(number, weights)
            popped = self._take(grads, number)
            new, state, done, _ = self.programs.update(bucket, old, state, popped, factor, value, finite)
            weights.update(zip(bucket.names, new, strict=True))
            return state

        self._stream(model.optimizer, update)
        return self._state(weights, model.optimizer, self._formed(model)), done

    def reducing(self, model: ModelState, sums: Params, value: Any, finite: jax.Array) -> tuple[ModelState, jax.Array]:
        """Return the state after an update by unreduced gradient sums, and the gradients' global norm.

        `sums` are laid out by `unreduced_spec`; the state must not be split over `data`. Collectives: those of
        `reduce_gradients`. A bucket's reduction shares a program with the update of the previous bucket; neither waits.
        """
        weights, sums = self._values(model), dict(sums)
        row, factor = self.programs.reduce(self.buckets[0], self._take(sums, 0)), np.float32(1.0)

        def update(number: int, state: optax.OptState) -> optax.OptState:
            nonlocal row
            bucket, old = self._begin(number, weights)
            last = number + 1 == len(self.buckets)
            following = None if last else (self.buckets[number + 1], self._take(sums, number + 1))
            new, state, _, row = self.programs.update(bucket, old, state, row, factor, value, finite, following)
            weights.update(zip(bucket.names, new, strict=True))
            return state

        self._stream(model.optimizer, update)
        return self._state(weights, model.optimizer, self._formed(model)), _norm(row[1], finite)

    def program(self, state: ModelState) -> Apply:
        """Return the update as a function; not one compiled program, since the host has to wait for device memory."""
        return lambda state, grads, factor, value: self.apply_update(state, grads, factor, value, np.bool_(True))

    def restored(
        self,
        masters: Params,
        optimizer: optax.OptState,
        extra: Params = {},  # noqa: B006
        *,
        owned: bool = False,
    ) -> ModelState:
        """Return the state with these float32 weights and optax state, in the form of `masters` and `opt_state`.

        Arrays that have to be cut are freed one after another if they are `owned`.
        """
        weights = {}
        # One at a time: joining a cut array makes a full float32 copy, which is freed again after the cast.
        for name, value in masters.items():
            weight = jax.device_put(materialize(value), NamedSharding(self.mesh, self._on_devices.specs[name]))
            weights[name] = weight.astype(self._precisions.weights_of(name))
        leaves = tree_leaves_with_path((masters if self._precisions.master_weights else {}, optimizer))
        pieces = {path: self._parts(path, leaf, owned) for path, leaf in leaves}  # a `CutArray` is a leaf

        def bucket_state(bucket: Bucket) -> optax.OptState:
            def piece_of(path: tuple[object, ...], _: object) -> jax.Array:
                leaf_pieces = pieces[path]
                leaf = leaf_pieces[bucket.part if len(leaf_pieces) > 1 else 0]
                return leaf if leaf.ndim else transferred(leaf, "device")  # each bucket uses its numbers up

            return tree_map_with_path(piece_of, self.programs.abstract_state(bucket.abstract(self.mesh)))

        states = [bucket_state(bucket) for bucket in self.buckets]
        settle(states, self._staying)
        return self._state(weights, states, self._empty(extra))

    def opt_state(self, model: ModelState) -> optax.OptState:
        """Return the optax state in host memory; cut arrays are `CutArray`s."""
        return self._by_parameter(model)[1]

    def masters(self, model: ModelState) -> Params:
        """Return float32 weights by name: masters in host memory, cut ones as `CutArray`s, or the model's weights."""
        return self._by_parameter(model)[0] if self._precisions.master_weights else self._values(model)

    def _stream(self, states: list[optax.OptState], update: Callable[[int, optax.OptState], optax.OptState]) -> None:
        """Update all states; after the first update, decide which stay on the devices."""
        self._staying = {number for number, state in enumerate(states) if stays(state)}
        stream(states, update, self._staying)
        # Only now does the device's peak include a complete step, so the room beside it is known.
        if self._undecided and not self._staying:
            jax.block_until_ready(states)
            self._staying = fitting(self._sizes, room(self.mesh))
            settle(states, self._staying)
        self._undecided = False

    def _values(self, model: ModelState) -> Params:
        formed = self._formed(model)
        plain: Any = {name: weight for name, weight in model.weights.items() if name not in formed}
        return plain if self._on_devices.forms is None else plain | _values(self._on_devices.forms, formed)

    def _formed(self, model: ModelState) -> Weights:
        forms = self._on_devices.forms
        return {} if forms is None else {name: model.weights[name] for name in forms.shapes}

    def _empty(self, extra: Params) -> Weights:
        forms = self._on_devices.forms
        return {} if forms is None else _first(forms, self._precisions.weights, extra)

    def _state(self, weights: Params, optimizer: optax.OptState, onto: Weights) -> ModelState:
        """Return the state of the buckets' weights; `onto` receives the values of pruned parameters."""
        forms = self._on_devices.forms
        if forms is None:
            return ModelState({**weights}, {}, optimizer)
        formed = _with_values(forms, onto, {name: weights[name] for name in onto})
        return ModelState({**weights, **formed}, {}, optimizer)

    def _by_parameter(self, model: ModelState) -> tuple[Params, optax.OptState]:
        leaves = [dict(tree_leaves_with_path(state)) for state in model.optimizer]

        def leaf_of(path: tuple[object, ...], target: jax.ShapeDtypeStruct) -> jax.Array | CutArray:
            name = owner(path, self._shapes)
            numbers = [0] if name is None else self._numbers[name]
            if name is None or len(numbers) == 1 or target.shape != self._shapes[name]:
                return leaves[numbers[0]][path]
            parts = tuple(leaves[number][path] for number in numbers)
            return CutArray(parts, target.shape, self._host_shardings[name], self.buckets[numbers[0]].dim)

        abstract = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes.items()}
        return tree_map_with_path(leaf_of, self.programs.abstract_state(abstract))  # type: ignore[no-any-return]

    def _parts(self, path: tuple[object, ...], array: jax.Array, owned: bool) -> list[Any]:
        name = owner(path, self._shapes)
        if isinstance(array, CutArray):
            return list(array.parts)
        if name is None or array.shape != self._shapes[name]:
            return [transferred(array)]
        if array.sharding != self._host_shardings[name]:
            array = jax.device_put(array, self._host_shardings[name])
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
        """Return a bucket's gradients, and drop those that no later bucket needs to free their memory early."""
        names = self.buckets[number].names
        return [grads.pop(name) if self._numbers[name][-1] == number else grads[name] for name in names]


@partial(jax.jit, static_argnums=0)
def _values(forms: PrunedLayout, weights: Weights) -> Params:
    return forms.values(weights)


@partial(jax.jit, static_argnums=(0, 1))
def _first(forms: PrunedLayout, dtype: jnp.dtype, extra: Params) -> Weights:
    return forms.first(extra, dtype)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _with_values(forms: PrunedLayout, weights: Weights, values: Params) -> Weights:
    return forms.written(weights, values)


@jax.jit
def _norm(squares: jax.Array, finite: jax.Array) -> jax.Array:
    return jnp.where(finite, jnp.sqrt(jnp.sum(squares)), jnp.inf)
