"""Where a streamed update has its gradients from: reduced before it, or bucket by bucket while it runs."""

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.reduce import reduced_axes
from axonn_jax.memory.update_buckets import Bucket, last_uses
from axonn_jax.tensor.clip import spec_axes
from axonn_jax.tensor.collectives import reduce_sum
from axonn_jax.tensor.params import Params, Specs

Arrays = list[jax.Array]


class Gradients(Protocol):
    """A step's gradients as the update of one bucket after another takes them."""

    def program(self, number: int) -> Hashable:
        """Updates of buckets alike for which this is the same too are one program."""

    def given(self, number: int) -> tuple[Arrays, list[P]]:
        """What the update of a bucket takes, and the layouts."""

    def inside(self, number: int, given: Arrays, start: jax.Array) -> tuple[Arrays, Arrays]:
        """In the program of an update, on local shards: the bucket's gradients, and what `ran` is told.

        `start` is where the bucket begins in a parameter that is cut.
        """

    def results(self, number: int) -> list[P]:
        """Layouts of what `inside` gives beside gradients."""

    def ran(self, number: int, results: Arrays) -> None:
        """Told when the update of a bucket has been started."""


class Reduced:
    """Gradients that were reduced before the update."""

    def __init__(self, grads: Params, buckets: Sequence[Bucket], specs: Specs):
        self._grads, self._buckets, self._specs = dict(grads), buckets, specs
        self._last = last_uses(buckets)

    def program(self, number: int) -> Hashable:  # noqa: D102
        return "reduced"

    def given(self, number: int) -> tuple[Arrays, list[P]]:  # noqa: D102
        names = self._buckets[number].names
        return [self._grads[name] for name in names], [self._specs[name] for name in names]

    def inside(self, number: int, given: Arrays, start: jax.Array) -> tuple[Arrays, Arrays]:  # noqa: D102
        return [self._buckets[number].take(g, start) for g in given], []

    def results(self, number: int) -> list[P]:  # noqa: D102
        return []

    def ran(self, number: int, results: Arrays) -> None:  # noqa: D102
        for name in self._buckets[number].names:
            if self._last[name] == number:
                del self._grads[name]


Run = Callable[..., Any]
"""(key, function of local shards, layouts of its arguments, of its results, donated, arguments) -> its results."""


class Unreduced:
    """Every device's own sums of gradients; those of the next bucket are reduced beside the update of this one.

    One program does both, and neither waits for the other in it. `sums` are laid out by `unreduced_spec`.
    """

    def __init__(self, sums: Params, buckets: Sequence[Bucket], specs: Specs, mesh: Mesh, run: Run):
        self._sums, self._buckets, self._specs, self._mesh = dict(sums), buckets, specs, mesh
        self._last = last_uses(buckets)
        self._each = P(mesh.axis_names)  # a row, or a number, for every device
        first = buckets[0]
        given = [sums[name] for name in first.names]
        specs_in = [unreduced_spec(specs[name], mesh) for name in first.names]
        outs, start = ([self._each, self._each], P()), np.int32(first.start)
        key = ("reduce", first.program)
        (self._row, self._squares), _ = run(key, self._first, (specs_in, P()), outs, (), given, start)

    def program(self, number: int) -> Hashable:  # noqa: D102
        following = self._following(number)
        return "unreduced", following and following.program

    def given(self, number: int) -> tuple[Arrays, list[P]]:  # noqa: D102
        following = self._following(number)
        first, layouts = [self._row, self._squares], [self._each, self._each]
        if following is None:
            return first, layouts
        start: Any = np.int32(following.start)
        specs = [unreduced_spec(self._specs[name], self._mesh) for name in following.names]
        return [*first, start, *(self._sums[name] for name in following.names)], [*layouts, P(), *specs]

    def inside(self, number: int, given: Arrays, start: jax.Array) -> tuple[Arrays, Arrays]:
        """As `Gradients.inside`; collectives: all-reduces of the next bucket's row, as in `reduce_gradients`."""
        reduced, squares, *next_start_and_sums = given
        bucket = self._buckets[number]
        grads = [row.reshape(bucket.shape) for row in jnp.split(reduced, len(bucket.names))]
        if not next_start_and_sums:
            return grads, [squares]
        next_start, *sums = next_start_and_sums
        following, more = self._reduced(number + 1, sums, next_start)
        return grads, [following, squares + more]

    def results(self, number: int) -> list[P]:  # noqa: D102
        return [self._each] * (2 if self._following(number) else 1)

    def ran(self, number: int, results: Arrays) -> None:  # noqa: D102
        *rows, self._squares = results
        self._row = rows[0] if rows else None
        following = self._following(number)
        for name in following.names if following else ():
            if self._last[name] == number + 1:
                del self._sums[name]

    def norm(self, finite: jax.Array) -> jax.Array:
        """The global norm, once all updates have been started; an all-reduce of a number over all devices.

        Infinite where not `finite`.
        """
        return _root(self._squares, finite)

    def _following(self, number: int) -> Bucket | None:
        return self._buckets[number + 1] if number + 1 < len(self._buckets) else None

    def _first(self, sums: Arrays, start: jax.Array) -> tuple[Arrays, Arrays]:
        return list(self._reduced(0, sums, start)), []

    def _reduced(self, number: int, sums: Arrays, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A bucket's reduced row, and the sum of its squares over what a device has of it, each counted once."""
        bucket = self._buckets[number]
        spec = bucket.form.spec
        row = jnp.concatenate([bucket.take(g[0], start).reshape(-1) for g in sums])
        row = reduce_sum(row, reduced_axes(spec))
        copies = prod(size for axis, size in self._mesh.shape.items() if axis not in spec_axes(spec))
        return row, (jnp.sum(jnp.square(row.astype(jnp.float32))) / copies)[None]


@jax.jit
def _root(squares: jax.Array, finite: jax.Array) -> jax.Array:
    return jnp.where(finite, jnp.sqrt(jnp.sum(squares)), jnp.inf)


def unreduced_spec(spec: P, mesh: Mesh) -> P:
    """The layout of a parameter's unreduced sums [devices that add up, ...]: one for every device of `data` and `z`."""
    over = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1 and axis not in spec_axes(spec))
    return P(over or None, *spec)


def unreduced_shardings(specs: Specs, mesh: Mesh) -> dict[str, NamedSharding]:
    """Layouts of all parameters' unreduced sums."""
    return {name: NamedSharding(mesh, unreduced_spec(spec, mesh)) for name, spec in specs.items()}
