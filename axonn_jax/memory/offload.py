"""Optimizer state in host memory, streamed through the device a bucket at a time (AxoNN, IPDPS 22, section on memory).

On the device stay the weights and the gradients. Master weights and moments are on the host, with the layout that they
would have on the devices. While bucket k is updated, k+1 is on its way to the device and k-1 on its way back, so at
most three are on the device. A bucket's old state is freed when the new one takes its place.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.memory.account import Shapes, StateBytes, state_bytes
from axonn_jax.memory.elementwise import treatments
from axonn_jax.memory.gradients import Gradients, Reduced, Unreduced
from axonn_jax.memory.held import Held, moved, take_part
from axonn_jax.memory.pinned import check_room
from axonn_jax.memory.placement import on_host
from axonn_jax.memory.precision import Precisions
from axonn_jax.memory.slots import Slots, put_slots, slot_dtypes, take_slots
from axonn_jax.memory.update import Apply, ModelState
from axonn_jax.memory.update_buckets import Bucket, Form, own_piece, plan_updates, write_pieces
from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.region import manual

MASTER = "master"

Arrays = dict[str, list[jax.Array]]
"""A bucket's state: by slot, an array for each of its parameters."""


class OffloadState(NamedTuple):
    """Optimizer state of which only scalars are on the device; an update replaces the arrays in it one by one."""

    parts: dict[str, dict[str, list[jax.Array]]]
    """In host memory, by slot and parameter: one array, or the parts of one that is cut."""
    scalars: list[jax.Array]


class Offload:
    """An elementwise optimizer whose state is in host memory, for parameters on one mesh.

    Where weights are not float32, float32 masters are part of the state. `specs` lay out the weights, `state_specs` the
    state: the same, or split over `data` too (`memory.zero`). Parameters that are `alone` share no bucket, so that
    whoever else holds them updates them by the same program. `progress` is told of every bucket.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        shapes: Shapes,
        specs: Specs,
        state_specs: Specs,
        mesh: Mesh,
        *,
        precisions: Precisions,
        bucket: int,
        alone: Collection[str] = (),
        progress: Callable[[str], None] = lambda what: None,
    ):
        self.optimizer, self.mesh, self._precisions = optimizer, mesh, precisions
        self.specs = {name: specs[name] for name in shapes}
        self.state_specs = {name: state_specs[name] for name in shapes}
        self._shapes, self._progress = dict(shapes), progress
        self.weights, self.has_masters = precisions.weights, precisions.masters
        # Optimizers see no sizes here: what they do may depend on the number of dims alone.
        pieces = {name: jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32) for name, shape in shapes.items()}
        moments = slot_dtypes(optimizer, pieces)
        self.slots = ({MASTER: jnp.dtype(jnp.float32)} if self.has_masters else {}) | moments
        self._placed = {name: on_host(NamedSharding(mesh, spec)) for name, spec in self.state_specs.items()}
        treated = treatments(optimizer, pieces)
        forms = {
            name: Form(self._placed[name].shard_shape(shape), specs[name], state_specs[name], treated[name])
            for name, shape in self._shapes.items()
        }
        self.buckets = plan_updates(forms, bucket, alone)
        self._buckets_of = {name: [bucket for bucket in self.buckets if name in bucket.names] for name in shapes}
        self._programs: dict[Hashable, Any] = {}

    @property
    def programs(self) -> int:
        """How many programs have been compiled."""
        return len(self._programs)

    def bytes(self) -> StateBytes:
        """Bytes of one device and its host, by formula; beside them three buckets of state are on the device."""
        layouts = (self.specs, self.state_specs)
        return state_bytes(self._shapes, *layouts, self.mesh, self._precisions, self.optimizer, offload=True)

    def start(self, params: Params, *, owned: bool = True) -> ModelState:
        """Float32 parameters -> the first state; each that is `owned` is freed when nothing more is made of it."""
        check_room(self.bytes().host, self.mesh.local_devices)
        params = dict(params)
        weights: Params = {}
        parts: dict[str, dict[str, list[jax.Array]]] = {
            slot: {name: [] for name in self._shapes} for slot in self.slots
        }
        scalars: list[jax.Array] = []
        for number, bucket in enumerate(self.buckets):
            self._progress(f"the first optimizer state, bucket {number + 1} of {len(self.buckets)}")
            made, scalars = self._first(bucket, [params[name] for name in bucket.names])
            for slot, arrays in self._to_host(bucket, made).items():
                for name, array in zip(bucket.names, arrays, strict=True):
                    parts[slot][name].append(array)
            for name in bucket.names:
                if self._buckets_of[name][-1] is bucket:
                    value = params.pop(name)
                    weights[name] = value if not self.has_masters else value.astype(self.weights)
                    if self.has_masters and owned:
                        value.delete()
        return ModelState({name: weights[name] for name in self._shapes}, {}, OffloadState(parts, scalars))

    def after(self, model: ModelState, grads: Params, factor: jax.Array, finite: Any) -> ModelState:
        """The state after an update with `factor` times the gradients, none where not `finite`; `model` is used up.

        Moves every state byte to the device and back. Collectives: with ZeRO an all-gather of the new weights over
        `data`, a bucket at a time, `(G-1)/G * itemsize * elements` bytes a device.
        """
        return self._after(model, grads, factor, finite)[0]

    def _after(self, model: ModelState, grads: Params, factor: Any, finite: Any) -> tuple[ModelState, jax.Array]:
        return self._streamed(model, Reduced(grads, self.buckets, self.state_specs), factor, finite)

    def reducing(self, model: ModelState, sums: Params, finite: jax.Array) -> tuple[ModelState, jax.Array]:
        """As `after` for sums of gradients that are not reduced yet: the state, and the gradients' global norm.

        `sums` are laid out by `gradients.unreduced_spec`; state is not split over `data`. Collectives: those of
        `reduce_gradients`, a bucket's beside the update of the one before.
        """
        grads = Unreduced(sums, self.buckets, self.specs, self.mesh, self._run)
        model, _ = self._streamed(model, grads, np.float32(1.0), finite)
        return model, grads.norm(finite)

    def _streamed(self, model: ModelState, grads: Gradients, factor: Any, finite: Any) -> tuple[ModelState, jax.Array]:
        state: OffloadState = model.optimizer
        weights, scalars = dict(model.weights), state.scalars
        arriving = self._to_device(state, self.buckets[0])
        for number, bucket in enumerate(self.buckets):
            self._progress(f"the update, bucket {number + 1} of {len(self.buckets)}")
            here = arriving
            if number >= 2:  # its place on the device is free: room for the next
                jax.block_until_ready(self._kept(state, self.buckets[number - 2]))
            if number + 1 < len(self.buckets):
                arriving = self._to_device(state, self.buckets[number + 1])
            own = [weights[name] for name in bucket.names]
            new, here, results, [*scalars, done] = self._update(number, grads, own, here, state.scalars, factor, finite)
            weights.update(zip(bucket.names, new, strict=True))
            for slot, arrays in self._to_host(bucket, here).items():
                for name, array in zip(bucket.names, arrays, strict=True):
                    state.parts[slot][name][bucket.part] = array
            grads.ran(number, results)
        return ModelState(weights, {}, OffloadState(state.parts, scalars)), done

    def program(self, state: ModelState) -> Apply:
        """As `DeviceUpdate.program`; the streaming is done by the host, which waits for room on the devices."""

        def apply(state: ModelState, grads: Params, factor: jax.Array) -> tuple[ModelState, jax.Array]:
            return self._after(state, grads, factor, np.bool_(True))

        return apply

    def restored(self, masters: Params, optimizer: Any, *, owned: bool = False) -> ModelState:
        """The state that has these float32 weights and optax state, as `masters` and `opt_state` give them.

        Arrays that are to be cut are freed one after another where they are `owned`.
        """
        slots = take_slots(optimizer, self._full)
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in self.specs.items()}
        weights = {}
        for name, value in masters.items():
            master = value.whole() if isinstance(value, Held) else value
            weights[name] = jax.device_put(master, shardings[name]).astype(self.weights)
        arrays = ({MASTER: masters} if self.has_masters else {}) | slots.arrays
        parts = {
            slot: {name: self._cut(arrays[slot][name], name, owned) for name in self._shapes} for slot in self.slots
        }
        return ModelState(weights, {}, OffloadState(parts, slots.scalars))

    def opt_state(self, model: ModelState) -> Any:
        """The optax state, its arrays in host memory; what is cut is `Held`."""
        state: OffloadState = model.optimizer
        arrays = {slot: self._held(state, slot) for slot in self.slots if slot != MASTER}
        like = jax.eval_shape(self.optimizer.init, self._full)
        return put_slots(like, Slots(arrays, state.scalars), self._full)

    def masters(self, model: ModelState) -> Params:
        """The float32 weights by name, in host memory, `Held` where cut (on the devices where weights are float32)."""
        return self._held(model.optimizer, MASTER) if self.has_masters else model.weights

    def _held(self, state: OffloadState, slot: str) -> Params:
        found: dict[str, Any] = {}
        for name, parts in state.parts[slot].items():
            bucket, layout = self._buckets_of[name][0], (self._shapes[name], self._placed[name])
            found[name] = parts[0] if bucket.rows is None else Held(tuple(parts), bucket.dim, *layout)
        return found

    def _cut(self, array: Any, name: str, owned: bool) -> list[jax.Array]:
        buckets = self._buckets_of[name]
        if isinstance(array, Held):
            return list(array.parts)
        if array.sharding != self._placed[name]:
            array = jax.device_put(array, self._placed[name])
        if buckets[0].rows is None:
            return [array]
        parts = [take_part(array, bucket.dim, bucket.start, bucket.rows or 0) for bucket in buckets]
        if owned:
            array.delete()
        return parts

    @property
    def _full(self) -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes.items()}

    def _kept(self, state: OffloadState, bucket: Bucket) -> Arrays:
        return {slot: [arrays[name][bucket.part] for name in bucket.names] for slot, arrays in state.parts.items()}

    def _to_device(self, state: OffloadState, bucket: Bucket) -> Arrays:
        return self._moved(self._kept(state, bucket), NamedSharding(self.mesh, bucket.form.state_spec))

    def _to_host(self, bucket: Bucket, arrays: Arrays) -> Arrays:
        return self._moved(arrays, self._placed[bucket.names[0]])

    def _moved(self, arrays: Arrays, to: NamedSharding) -> Arrays:
        leaves, tree = jax.tree.flatten(arrays)
        return jax.tree.unflatten(tree, moved(leaves, [to] * len(leaves)))  # type: ignore[no-any-return]

    def _first(self, bucket: Bucket, params: list[jax.Array]) -> tuple[Arrays, list[jax.Array]]:
        def local(params: list[jax.Array], start: jax.Array) -> tuple[Arrays, list[jax.Array]]:
            pieces = {n: own_piece(p, bucket, start) for n, p in zip(bucket.names, params, strict=True)}
            slots = take_slots(self.optimizer.init(pieces), pieces)
            arrays = ({MASTER: pieces} if self.has_masters else {}) | slots.arrays
            return {slot: [arrays[slot][name] for name in bucket.names] for slot in self.slots}, slots.scalars

        specs = [bucket.form.spec] * len(params)
        key, start = ("first", bucket.program), np.int32(bucket.start)
        return self._run(key, local, (specs, P()), (self._state_specs(bucket), P()), (), params, start)  # type: ignore[no-any-return]

    def _update(
        self, number: int, source: Gradients, weights: list[jax.Array], arrays: Arrays, *rest: Any
    ) -> tuple[list[jax.Array], Arrays, list[jax.Array], list[jax.Array]]:
        bucket = self.buckets[number]
        names = bucket.names

        def local(
            weights: list[jax.Array],
            arrays: Arrays,
            given: list[jax.Array],
            start: jax.Array,
            scalars: list[jax.Array],
            factor: jax.Array,
            finite: jax.Array,
        ) -> tuple[list[jax.Array], Arrays, list[jax.Array], list[jax.Array]]:
            grads, results = source.inside(number, given, start)
            grad = {name: g.astype(jnp.float32) * factor for name, g in zip(names, grads, strict=True)}
            slots = {slot: dict(zip(names, found, strict=True)) for slot, found in arrays.items()}
            pieces = {n: own_piece(w, bucket, start) for n, w in zip(names, weights, strict=True)}
            masters = slots.pop(MASTER, pieces)
            like = jax.eval_shape(self.optimizer.init, masters)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
                state = put_slots(like, Slots(slots, scalars), masters)
                updates, state = self.optimizer.update(grad, state, masters)
            masters = optax.apply_updates(masters, updates)
            after = take_slots(state, masters)
            made = {MASTER: masters} | after.arrays
            kept = {
                slot: [jnp.where(finite, made[slot][n], old) for n, old in zip(names, found, strict=True)]
                for slot, found in arrays.items()
            }
            cast = [masters[name].astype(self.weights) for name in names]
            new = write_pieces(weights, cast, bucket, start, finite)
            numbers = [jnp.where(finite, n, o) for n, o in zip(after.scalars, scalars, strict=True)]
            return new, kept, results, [*numbers, jnp.zeros((), jnp.int32)]  # the last tells that this has run

        specs, state = [bucket.form.spec] * len(names), self._state_specs(bucket)
        grads, layouts = source.given(number)
        ins = (specs, state, layouts, P(), P(), P(), P())
        outs = (specs, state, source.results(number), P())
        key, start = (source.program(number), bucket.program), np.int32(bucket.start)
        return self._run(key, local, ins, outs, (0, 1), weights, arrays, grads, start, *rest)  # type: ignore[no-any-return]

    def _state_specs(self, bucket: Bucket) -> dict[str, list[P]]:
        return {slot: [bucket.form.state_spec] * len(bucket.names) for slot in self.slots}

    def _run(self, key: Hashable, local: Any, ins: Any, outs: Any, donated: tuple[int, ...], *given: Any) -> Any:
        """Runs a function of local shards, compiled at the first use of its key."""
        if key not in self._programs:
            run = manual(local, self.mesh, ins, outs, differentiated=False)
            scalars = len(jax.eval_shape(run, *given)[-1])
            outs = (*outs[:-1], [P()] * scalars)
            shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), outs, is_leaf=_is_spec)
            options = {"donate_argnums": donated, "out_shardings": shardings, "keep_unused": True}
            self._programs[key] = jax.jit(run, **options).lower(*given).compile()
        return self._programs[key](*given)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, P)
