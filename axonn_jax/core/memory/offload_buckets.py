"""Buckets of an offloaded update (alike parameters, or rows of a large one) and their compiled programs."""

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.memory.buckets import reduced_axes
from axonn_jax.core.memory.optimizer_state import state_layout
from axonn_jax.core.memory.optimizer_traits import Arrays, updated
from axonn_jax.core.memory.precision import Precisions
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.specs import further_split, shard_mapped, spec_axes

_MAX_PARAMS = 16
"""Most parameters that one program updates; more only take longer to compile."""


@dataclass(frozen=True)
class UpdateForm:
    """Everything a parameter's update program depends on, without its name, so that layers share programs."""

    shape: tuple[int, ...]
    """Shape of the parameter's state on one device."""
    spec: P
    """Layout of the parameter's weights."""
    state_spec: P
    treatment: int
    """Index of the optimizer's computation; parameters with the same index are updated alike."""
    dtype: jnp.dtype
    """Dtype of the parameter's weights."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one form that are fetched, updated and written back together; methods take local shards."""

    names: tuple[str, ...]
    """Sorted, like the keys of a pytree's dict."""
    form: UpdateForm
    part: int = 0
    """Index of the part, for a cut parameter."""
    dim: int = 0
    """Dim along which the parameter is cut."""
    start: int = 0
    rows: int | None = None
    """Rows of the part along `dim` on every device; None for uncut parameters."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the bucket's part of each parameter's state on one device."""
        shape = self.form.shape
        return shape if self.rows is None else (*shape[: self.dim], self.rows, *shape[self.dim + 1 :])

    @property
    def program(self) -> tuple[object, ...]:
        """Key of the update program, which buckets of equal keys share."""
        # `start` is an operand and not part of the key, so that all parts of a cut parameter share a program.
        return self.form, len(self.names), self.dim, self.rows

    def abstract(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Return abstract global arrays of the bucket's part of each parameter's state."""
        dims = [*self.form.state_spec, *[None] * (len(self.shape) - len(self.form.state_spec))]
        shape = tuple(
            size * prod(mesh.shape[axis] for axis in spec_axes(P(dim)))
            for size, dim in zip(self.shape, dims, strict=True)
        )
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in self.names}

    def take(self, arrays: list[jax.Array], start: jax.Array) -> list[jax.Array]:
        """Return the bucket's part of arrays shaped like its parameters' state."""
        if self.rows is None:
            return arrays
        return [lax.dynamic_slice_in_dim(array, start, self.rows, self.dim) for array in arrays]

    def take_weights(self, weights: list[jax.Array], start: jax.Array) -> list[jax.Array]:
        """Return, in float32, the elements of weights whose state is on this device."""
        split = further_split(self.form.spec, self.form.state_spec)
        if split is not None:
            dim, axes = split
            size = self.form.shape[dim]
            weights = [lax.dynamic_slice_in_dim(w, lax.axis_index(axes) * size, size, dim) for w in weights]
        return [part.astype(jnp.float32) for part in self.take(weights, start)]

    def write_weights(
        self, weights: list[jax.Array], parts: list[jax.Array], start: jax.Array, finite: jax.Array
    ) -> list[jax.Array]:
        """Write the bucket's new values into weights if they are `finite`.

        Collectives: an all-gather of split parts over the replicas.
        """
        shape, at = self.form.shape, self.dim
        dim, axes = further_split(self.form.spec, self.form.state_spec) or (None, ())
        # A separate replica dim in front of the split one lets one slice address the same rows of every replica.
        if dim is not None:
            parts = list(lax.all_gather(jnp.stack(parts), axes, axis=dim + 1))
            at += at >= dim
        new_weights = []
        for weight, part in zip(weights, parts, strict=True):
            view = weight if dim is None else weight.reshape(*shape[:dim], -1, *shape[dim:])
            starts = [start if d == at else jnp.int32(0) for d in range(view.ndim)]
            # Select on the part, not on the full weight, which would be copied.
            part = jnp.where(finite, part, lax.dynamic_slice(view, starts, part.shape))
            new_weights.append(lax.dynamic_update_slice(view, part, starts).reshape(weight.shape))
        return new_weights

    def split(self, row: jax.Array) -> list[jax.Array]:
        """Return the parts of a row from `reduce`."""
        return [part.reshape(self.shape) for part in jnp.split(row, len(self.names))]

    def reduce(self, sums: list[jax.Array], start: jax.Array, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
        """Reduce the bucket's part of sums [1, ...], laid out by `unreduced_spec`.

        Returns the reduced elements as a row and their sum of squares [1]. Collective: one all-reduce, bytes as in
        `reduce_gradients`.
        """
        spec = self.form.spec
        row = jnp.concatenate([part.reshape(-1) for part in self.take([g[0] for g in sums], start)])
        row = all_reduce(row, reduced_axes(spec))
        # Divide by the number of devices with the same elements, so that a sum over devices counts each of them once.
        copies = prod(size for axis, size in mesh.shape.items() if axis not in spec_axes(spec))
        return row, (jnp.sum(jnp.square(row.astype(jnp.float32))) / copies)[None]


def plan_updates(
    forms: Mapping[str, UpdateForm], capacity: int, shared: Collection[str] = (), *, cut: bool = True
) -> list[Bucket]:
    """Return buckets of parameters of equal form, of at most `capacity` elements per device.

    `shared` parameters come first, each in a separate bucket. With `cut`, a parameter larger than `capacity` is cut
    along the first dim with enough rows, or else the longest.
    """
    groups: dict[tuple[UpdateForm, str], list[str]] = {}
    for name in sorted(forms, key=lambda name: (name not in shared, name)):
        groups.setdefault((forms[name], name if name in shared else ""), []).append(name)
    buckets: list[Bucket] = []
    for (form, _), names in groups.items():
        size = max(prod(form.shape), 1)
        if size > capacity and cut:
            parts = -(-size // capacity)
            dim = next((d for d, n in enumerate(form.shape) if n >= parts), form.shape.index(max(form.shape)))
            rows = -(-form.shape[dim] // min(parts, form.shape[dim]))
            buckets += [
                Bucket((name,), form, part, dim, start, min(rows, form.shape[dim] - start))
                for name in names
                for part, start in enumerate(range(0, form.shape[dim], rows))
            ]
            continue
        count = -(-len(names) // min(max(capacity // size, 1), _MAX_PARAMS))
        size_limit = -(-len(names) // count)
        buckets += [Bucket(tuple(names[at : at + size_limit]), form) for at in range(0, len(names), size_limit)]
    return buckets


def unreduced_spec(spec: P, mesh: Mesh) -> P:
    """Return the layout of a parameter's unreduced sums; the leading dim has an entry for each device that adds up."""
    over = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1 and axis not in spec_axes(spec))
    return P(over or None, *spec)


def unreduced_shardings(specs: Specs, mesh: Mesh) -> dict[str, NamedSharding]:
    """Return the shardings of all parameters' unreduced sums."""
    return {name: NamedSharding(mesh, unreduced_spec(spec, mesh)) for name, spec in specs.items()}


Row = tuple[jax.Array, jax.Array]
"""Reduced gradients of a bucket, flattened on every device, and the sum of squares of all gradients so far."""


class BucketPrograms:
    """Programs on a bucket's arrays on one mesh, each compiled at its first use."""

    def __init__(self, optimizer: optax.GradientTransformation, mesh: Mesh, precisions: Precisions):
        self.optimizer, self.mesh = optimizer, mesh
        self.master_weights = precisions.master_weights
        self.compiled: dict[Hashable, Any] = {}
        self._row = P(mesh.axis_names)

    def abstract_state(self, params: Arrays) -> tuple[Arrays, optax.OptState]:
        """Return the abstract state of parameters: masters and optax state."""
        optimizer = jax.eval_shape(self.optimizer.init, dict(params))  # type: ignore[arg-type]
        return params if self.master_weights else {}, optimizer

    def state_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of a bucket's state on one device, without scalars, which are never offloaded."""
        leaves = jax.tree.leaves(self.abstract_state(bucket.abstract(self.mesh)))
        layouts = jax.tree.leaves(self._state_shardings(bucket))
        return sum(
            prod(layout.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf, layout in zip(leaves, layouts, strict=True)
            if leaf.ndim
        )

    def first(self, bucket: Bucket, params: list[jax.Array]) -> optax.OptState:
        """Return the initial state of float32 parameters, on the devices."""

        def first(params: list[jax.Array], start: jax.Array) -> list[jax.Array]:
            masters = self._masters_of(bucket, params, start)
            return jax.tree.leaves((masters if self.master_weights else {}, self.optimizer.init(masters)))

        shardings = self._state_shardings(bucket)
        leaves = self._run(
            ("first", bucket.program), first, lambda: jax.tree.leaves(shardings), (), params, np.int32(bucket.start)
        )
        return jax.tree.unflatten(jax.tree.structure(shardings), leaves)

    def update(
        self,
        bucket: Bucket,
        weights: list[jax.Array],
        state: optax.OptState,
        grads: list[jax.Array] | Row,
        factor: jax.Array | np.float32,
        value: jax.Array,
        finite: jax.Array | np.bool,
        following: tuple[Bucket, list[jax.Array]] | None = None,
    ) -> tuple[list[jax.Array], optax.OptState, jax.Array, Any]:
        """Update a bucket; weights and state are donated.

        Returns new weights, new state, an array that is ready at the end, and the `following` bucket's row, reduced in
        the same program. Collectives: those of `write_weights`, and of `reduce` for the following bucket.
        """
        names, leaves, tree = bucket.names, *jax.tree.flatten(state)
        specs, states = ([spec] * len(names) for spec in (bucket.form.spec, bucket.form.state_spec))
        reduced = isinstance(grads, list)

        def update(weights: list[jax.Array], leaves: list[jax.Array], start: Any, grads: Any, *operands: Any) -> Any:
            factor, value, finite, ahead = operands
            masters, optimizer = jax.tree.unflatten(tree, leaves)
            masters = masters or self._masters_of(bucket, weights, start)
            row = () if reduced else grads
            if reduced:
                parts = self._manual(bucket.take, (states, P()), states)(grads, start)
            else:
                parts = self._manual(bucket.split, (self._row,), states)(grads[0])
            parts = {name: part.astype(jnp.float32) * factor for name, part in zip(names, parts, strict=True)}
            updates, optimizer = updated(self.optimizer, parts, optimizer, masters, value)
            masters = optax.apply_updates(masters, updates)
            cast = [masters[name].astype(bucket.form.dtype) for name in names]
            write = self._manual(bucket.write_weights, (specs, states, P(), P()), specs)
            new_state = jax.tree.leaves((masters if self.master_weights else {}, optimizer))
            selected = [jnp.where(finite, new, old) for new, old in zip(new_state, leaves, strict=True)]
            if following:
                row, squares = self._reduction(following[0])(*ahead)
                row = row, squares + grads[1]
            return write(weights, cast, start, finite), selected, jnp.zeros((), jnp.int32), row

        def shardings() -> Any:
            rows = () if reduced else (NamedSharding(self.mesh, self._row),) * 2
            weight_shardings = [NamedSharding(self.mesh, spec) for spec in specs]
            return weight_shardings, jax.tree.leaves(self._state_shardings(bucket)), NamedSharding(self.mesh, P()), rows

        ahead = (following[1], np.int32(following[0].start)) if following else ()
        operands = (weights, leaves, np.int32(bucket.start), grads, factor, value, finite, ahead)
        key = (bucket.program, reduced, following and following[0].program)
        new, leaves, done, row = self._run(key, update, shardings, (0, 1), *operands)
        return new, jax.tree.unflatten(tree, leaves), done, row

    def reduce(self, bucket: Bucket, sums: list[jax.Array]) -> Row:
        """Return the row of a bucket's sums; collectives of `Bucket.reduce`."""
        arguments = (sums, np.int32(bucket.start))
        shardings = (NamedSharding(self.mesh, self._row),) * 2
        return self._run(("reduce", bucket.program), self._reduction(bucket), lambda: shardings, (), *arguments)  # type: ignore[no-any-return]

    def _masters_of(self, bucket: Bucket, weights: list[jax.Array], start: jax.Array) -> Params:
        specs, states = ([spec] * len(weights) for spec in (bucket.form.spec, bucket.form.state_spec))
        parts = self._manual(bucket.take_weights, (specs, P()), states)(weights, start)
        return dict(zip(bucket.names, parts, strict=True))

    def _reduction(self, bucket: Bucket) -> Callable[..., Any]:
        specs = [unreduced_spec(bucket.form.spec, self.mesh)] * len(bucket.names)
        return self._manual(lambda sums, start: bucket.reduce(sums, start, self.mesh), (specs, P()), (self._row,) * 2)

    def _manual(self, local: Callable[..., object], ins: object, outs: object) -> Callable[..., Any]:
        return shard_mapped(local, self.mesh, ins, outs, differentiated=False)

    def _state_shardings(self, bucket: Bucket) -> optax.OptState:
        shapes = bucket.abstract(self.mesh)
        layouts = dict.fromkeys(shapes, NamedSharding(self.mesh, bucket.form.state_spec))
        masters, optimizer = self.abstract_state(shapes)
        return (layouts if masters else {}), state_layout(optimizer, shapes, layouts, NamedSharding(self.mesh, P()))

    def _run(
        self, key: Hashable, function: Any, shardings: Callable[[], Any], donated: tuple[int, ...], *arguments: object
    ) -> Any:
        if key not in self.compiled:
            # `keep_unused`: a weight that is overwritten without being read must still be donated.
            options = {"donate_argnums": donated, "out_shardings": shardings(), "keep_unused": True}
            self.compiled[key] = jax.jit(function, **options).lower(*arguments).compile()
        return self.compiled[key](*arguments)
