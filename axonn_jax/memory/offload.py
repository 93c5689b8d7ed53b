"""Optimizer state in host memory, streamed through the device a bucket at a time (AxoNN, IPDPS 22, section on memory).

On the device stay the weights and the gradients. Master weights and moments are flat buckets on the host, laid out
over all devices, each device having those of its own shards. While bucket k is updated, k+1 is on its way to the device
and k-1 on its way back, so at most three are on the device.
"""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.memory.account import Shapes, StateBytes, state_bytes
from axonn_jax.memory.flat import Bucket, Span, last_uses, plan_flat
from axonn_jax.memory.gradients import Gradients, Reduced, Unreduced
from axonn_jax.memory.joined import flattened, joined
from axonn_jax.memory.pinned import check_room
from axonn_jax.memory.placement import on_host
from axonn_jax.memory.precision import Precisions
from axonn_jax.memory.rows import cut, cut_row, row
from axonn_jax.memory.slots import Slots, put_slots, slot_dtypes, take_slots
from axonn_jax.memory.store import DiskStore, Flats, HostStore, Store
from axonn_jax.memory.update import Apply, ModelState
from axonn_jax.memory.zero import from_parts, in_parts
from axonn_jax.tensor.clip import split_dim
from axonn_jax.tensor.collectives import axis_index
from axonn_jax.tensor.params import Params, Specs
from axonn_jax.tensor.region import manual

MASTER = "master"


class OffloadState(NamedTuple):
    """Optimizer state of which only scalars are on the device."""

    flats: tuple[Any, ...]
    """By bucket, as the store has it."""
    scalars: list[jax.Array]


class Offload:
    """An elementwise optimizer whose state is in host memory, for parameters on one mesh.

    Where weights are not float32, float32 masters are part of the state. `specs` lay out the weights, `state_specs` the
    state: the same, or split over `data` too (`memory.zero`).
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
        disk: Path | None = None,
    ):
        self.optimizer, self.mesh, self._precisions = optimizer, mesh, precisions
        self.specs = {name: specs[name] for name in shapes}
        self.state_specs = {name: state_specs[name] for name in shapes}
        self._shapes = dict(shapes)
        self.weights, self.has_masters = precisions.weights, precisions.masters
        # Optimizers see one dim more than nothing at most: the number of dims tells matrices from vectors.
        pieces = {name: jax.ShapeDtypeStruct((1,) * len(shape), jnp.float32) for name, shape in shapes.items()}
        moments = slot_dtypes(optimizer, pieces)
        self.slots = ({MASTER: jnp.dtype(jnp.float32)} if self.has_masters else {}) | moments
        split = {name for name in shapes if split_dim(self.state_specs[name], "data") is not None}
        sizes = {name: prod(self.local_shape(name)) for name in shapes}
        self.buckets = [
            *plan_flat({name: size for name, size in sizes.items() if name in split}, bucket, split=True),
            *plan_flat({name: size for name, size in sizes.items() if name not in split}, bucket, split=False),
        ]
        self._last = last_uses(self.buckets)
        self._flat = NamedSharding(mesh, P(mesh.axis_names))
        self._store: Store = HostStore(self._flat) if disk is None else DiskStore(disk, self._flat)
        self._programs: dict[str, Any] = {}  # by text
        self._of_bucket: dict[tuple[str, int], Any] = {}

    def bytes(self) -> StateBytes:
        """Bytes of one device and its host, by formula; beside them three buckets of state are on the device."""
        layouts = (self.specs, self.state_specs)
        return state_bytes(self._shapes, *layouts, self.mesh, self._precisions, self.optimizer, offload=True)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter's state on one device."""
        sharding = NamedSharding(self.mesh, self.state_specs[name])
        return sharding.shard_shape(self._shapes[name])

    def start(self, params: Params, *, owned: bool = True) -> ModelState:
        """Float32 parameters -> the first state; each that is `owned` is freed when nothing more is made of it."""
        if isinstance(self._store, HostStore):
            check_room(self.bytes().host, self.mesh.local_devices)
        params = dict(params)
        weights: Params = {}
        flats: list[Any] = []
        scalars: list[jax.Array] = []
        for number, bucket in enumerate(self.buckets):
            made, scalars = self._first(number, [params[name] for name in bucket.names])
            flats.append(self._store.put(number, made))
            for name in bucket.names:
                if self._last[name] == number:
                    value = params.pop(name)
                    weights[name] = value if not self.has_masters else value.astype(self.weights)
                    if self.has_masters and owned:
                        value.delete()
        self._store.commit(len(flats))
        return ModelState({name: weights[name] for name in self._shapes}, {}, OffloadState(tuple(flats), scalars))

    def after(self, model: ModelState, grads: Params, factor: jax.Array, finite: Any) -> ModelState:
        """The state after an update with `factor` times the gradients, none where not `finite`; `model` is used up.

        Moves every state byte to the device and back. Collectives: with ZeRO an all-gather of the new weights over
        `data`, a bucket at a time, `(G-1)/G * itemsize * elements` bytes a device.
        """
        return self._after(model, grads, factor, finite)[0]

    def _after(self, model: ModelState, grads: Params, factor: Any, finite: Any) -> tuple[ModelState, jax.Array]:
        return self._streamed(model, Reduced(grads, self.buckets, self.state_specs), factor, finite)

    def reducing(self, model: ModelState, sums: Params) -> tuple[ModelState, jax.Array]:
        """As `after` for sums of gradients that are not reduced yet: the state, and the gradients' global norm.

        `sums` are laid out by `gradients.unreduced_spec`; state is not split over `data`. Collectives: those of
        `reduce_gradients`, a bucket's beside the update of the one before.
        """
        grads = Unreduced(sums, self.buckets, self.specs, self.mesh, self._run)
        model, _ = self._streamed(model, grads, np.float32(1.0), np.bool_(True))
        return model, grads.norm()

    def _streamed(self, model: ModelState, grads: Gradients, factor: Any, finite: Any) -> tuple[ModelState, jax.Array]:
        state: OffloadState = model.optimizer
        weights, flats, scalars = dict(model.weights), list(state.flats), state.scalars
        arriving = self._store.get(flats[0])
        for number, bucket in enumerate(self.buckets):
            here = arriving
            if number >= 2:
                self._store.settle(flats[number - 2])  # its place on the device is free: room for the next
            if number + 1 < len(self.buckets):
                arriving = self._store.get(flats[number + 1])
            own = [weights[name] for name in bucket.names]
            new, here, results, [*scalars, done] = self._update(number, grads, own, here, state.scalars, factor, finite)
            weights.update(zip(bucket.names, new, strict=True))
            flats[number] = self._store.put(number, here)
            grads.ran(number, results)
        self._store.commit(len(flats))
        return ModelState(weights, {}, OffloadState(tuple(flats), scalars)), done

    def program(self, state: ModelState) -> Apply:
        """As `DeviceUpdate.program`; the streaming is done by the host, which waits for room on the devices."""

        def apply(state: ModelState, grads: Params, factor: jax.Array) -> tuple[ModelState, jax.Array]:
            return self._after(state, grads, factor, np.bool_(True))

        return apply

    def restored(self, masters: Params, optimizer: Any) -> ModelState:
        """The state that has these float32 weights and optax state, as `masters` and `opt_state` give them."""
        slots = take_slots(optimizer, self._full)
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in self.specs.items()}
        weights = {name: jax.device_put(p, shardings[name]).astype(self.weights) for name, p in masters.items()}
        own = {MASTER: masters} if self.has_masters else {}
        return ModelState(weights, {}, self.filled({**own, **slots.arrays}, slots.scalars))

    def opt_state(self, model: ModelState) -> Any:
        """The optax state, its arrays in host memory."""
        state: OffloadState = model.optimizer
        arrays = {slot: self.arrays(state, slot) for slot in self.slots if slot != MASTER}
        like = jax.eval_shape(self.optimizer.init, self._full)
        return put_slots(like, Slots(arrays, state.scalars), self._full)

    def masters(self, model: ModelState) -> Params:
        """The float32 weights by name, in host memory (on the devices where weights are float32)."""
        return self.arrays(model.optimizer, MASTER) if self.has_masters else model.weights

    def arrays(self, state: OffloadState, slot: str) -> Params:
        """One slot by parameter: global arrays in host memory, laid out by `state_specs`, put together on the host."""
        return joined(
            self.buckets, [self._store.view(flats)[slot] for flats in state.flats], self._shapes, self._placed
        )

    def filled(self, slots: Mapping[str, Params], scalars: list[jax.Array]) -> OffloadState:
        """The state that has these slots, given as `arrays` gives them; what is of a device stays with it."""
        flats = []
        for number, bucket in enumerate(self.buckets):
            made = {slot: flattened(bucket, arrays, on_host(self._flat)) for slot, arrays in slots.items()}
            flats.append(self._store.put(number, made))
        self._store.commit(len(flats))
        return OffloadState(tuple(flats), scalars)

    @property
    def _full(self) -> dict[str, Any]:
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self._shapes.items()}

    @property
    def _placed(self) -> dict[str, NamedSharding]:
        return {name: on_host(NamedSharding(self.mesh, spec)) for name, spec in self.state_specs.items()}

    def _first(self, number: int, params: list[jax.Array]) -> tuple[Flats, list[jax.Array]]:
        bucket = self.buckets[number]

        def local(params: list[jax.Array]) -> tuple[Flats, list[jax.Array]]:
            pieces = {s.name: self._piece(p, s) for s, p in zip(bucket.spans, params, strict=True)}
            slots = take_slots(self.optimizer.init(pieces), pieces)
            arrays = ({MASTER: pieces} if self.has_masters else {}) | slots.arrays
            return {slot: row(bucket, arrays[slot]) for slot in self.slots}, slots.scalars

        specs = [self.specs[name] for name in bucket.names]
        return self._run(("first", number), local, (specs,), (self._flat_specs, P()), (), params)  # type: ignore[no-any-return]

    def _update(
        self, number: int, source: Gradients, weights: list[jax.Array], flats: Flats, *rest: Any
    ) -> tuple[list[jax.Array], Flats, list[jax.Array], list[jax.Array]]:
        bucket = self.buckets[number]

        def local(
            weights: list[jax.Array],
            flats: Flats,
            given: list[jax.Array],
            scalars: list[jax.Array],
            factor: jax.Array,
            finite: jax.Array,
        ) -> tuple[list[jax.Array], Flats, list[jax.Array], list[jax.Array]]:
            pairs = list(zip(bucket.spans, weights, strict=True))
            grads, results = source.inside(number, given, [w.ndim for w in weights])
            grad = {s.name: g.astype(jnp.float32) * factor for s, g in zip(bucket.spans, grads, strict=True)}
            arrays = {slot: {s.name: cut_row(flat, s, w.ndim) for s, w in pairs} for slot, flat in flats.items()}
            masters = arrays.pop(MASTER, None) or {s.name: self._piece(w, s) for s, w in pairs}
            like = jax.eval_shape(self.optimizer.init, masters)
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
                state = put_slots(like, Slots(arrays, scalars), masters)
                updates, state = self.optimizer.update(grad, state, masters)
            masters = optax.apply_updates(masters, updates)
            slots = take_slots(state, masters)
            rows = {slot: row(bucket, found) for slot, found in ({MASTER: masters} | slots.arrays).items()}
            kept = {slot: jnp.where(finite, rows[slot], flat) for slot, flat in flats.items()}
            new = self._spread(bucket, weights, rows[MASTER].astype(self.weights), finite)
            numbers = [jnp.where(finite, n, o) for n, o in zip(slots.scalars, scalars, strict=True)]
            return new, kept, results, [*numbers, jnp.zeros((), jnp.int32)]  # the last tells that this has run

        specs = [self.specs[name] for name in bucket.names]
        grads, layouts = source.given(number)
        ins = (specs, self._flat_specs, layouts, P(), P(), P())
        outs = (specs, self._flat_specs, source.results(number), P())
        return self._run((source.kind, number), local, ins, outs, (0, 1), weights, flats, grads, *rest)  # type: ignore[no-any-return]

    def _spread(self, bucket: Bucket, weights: list[jax.Array], row: jax.Array, finite: jax.Array) -> list[jax.Array]:
        """Writes a bucket's new weights into their arrays, gathered over `data` where they are split over it."""
        parts = self.mesh.shape["data"] if bucket.split else 1
        rows = lax.all_gather(row, "data") if bucket.split else row[None]
        out = []
        for span, weight in zip(bucket.spans, weights, strict=True):
            dim = split_dim(self.state_specs[span.name], "data") or 0
            shape = weight.shape or (1,)
            whole, piece = in_parts(weight.reshape(shape), dim, parts), rows[:, span.at : span.at + span.size]
            piece = jnp.where(finite, piece, whole[:, span.start : span.stop])
            whole = lax.dynamic_update_slice(whole, piece, (0, span.start))
            out.append(from_parts(whole, dim, shape).reshape(weight.shape))
        return out

    def _piece(self, whole: jax.Array, span: Span) -> jax.Array:
        """The float32 elements of a weight's local shard that a device keeps the state of, in a span."""
        dim = split_dim(self.state_specs[span.name], "data")
        if dim is not None:
            size = whole.shape[dim] // self.mesh.shape["data"]
            whole = lax.dynamic_slice_in_dim(whole, axis_index("data") * size, size, dim)
        return cut(whole, span).astype(jnp.float32)

    @cached_property
    def _flat_specs(self) -> dict[str, P]:
        return dict.fromkeys(self.slots, self._flat.spec)

    def _run(
        self, which: tuple[str, int], local: Any, ins: Any, outs: Any, donated: tuple[int, ...], *given: Any
    ) -> Any:
        """Runs a function of local shards, compiled at its first use; equal programs of several buckets once."""
        if which not in self._of_bucket:
            run = manual(local, self.mesh, ins, outs, differentiated=False)
            scalars = len(jax.eval_shape(run, *given)[-1])
            outs = (*outs[:-1], [P()] * scalars)
            shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), outs, is_leaf=_is_spec)
            options = {"donate_argnums": donated, "out_shardings": shardings, "keep_unused": True}
            lowered = jax.jit(run, **options).lower(*given)
            text = lowered.as_text()  # in which names do not appear
            if text not in self._programs:
                self._programs[text] = lowered.compile()
            self._of_bucket[which] = self._programs[text]
        return self._of_bucket[which](*given)


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, P)
