"""Where a streamed update has its gradients from: reduced before it, or bucket by bucket while it runs."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.flat import Bucket, last_uses
from axonn_jax.memory.reduce import reduced_axes
from axonn_jax.memory.rows import cut, cut_row, row
from axonn_jax.tensor.clip import spec_axes
from axonn_jax.tensor.collectives import reduce_sum
from axonn_jax.tensor.params import Params, Specs

Arrays = list[jax.Array]


class Gradients(Protocol):
    """A step's gradients as the update of one bucket after another takes them."""

    kind: str
    """Programs of updates with gradients of another kind are others."""

    def given(self, number: int) -> tuple[Arrays, list[P]]:
        """What the update of a bucket takes, and the layouts."""

    def inside(self, number: int, given: Arrays, dims: Sequence[int]) -> tuple[Arrays, Arrays]:
        """In the program of an update, on local shards: the bucket's gradients, a span each, and what `ran` is told.

        `dims` are the numbers of dims of the parameters.
        """

    def results(self, number: int) -> list[P]:
        """Layouts of what `inside` gives beside gradients."""

    def ran(self, number: int, results: Arrays) -> None:
        """Told when the update of a bucket has been started."""


class Reduced:
    """Gradients that were reduced before the update."""

    kind = "reduced"

    def __init__(self, grads: Params, buckets: Sequence[Bucket], specs: Specs):
        self._grads, self._buckets, self._specs = dict(grads), buckets, specs
        self._last = last_uses(buckets)

    def given(self, number: int) -> tuple[Arrays, list[P]]:  # noqa: D102
        names = self._buckets[number].names
        return [self._grads[name] for name in names], [self._specs[name] for name in names]

    def inside(self, number: int, given: Arrays, dims: Sequence[int]) -> tuple[Arrays, Arrays]:  # noqa: D102
        spans = self._buckets[number].spans
        return [cut(g, span) for g, span in zip(given, spans, strict=True)], []

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

    kind = "unreduced"

    def __init__(self, sums: Params, buckets: Sequence[Bucket], specs: Specs, mesh: Mesh, run: Run):
        self._sums, self._buckets, self._specs, self._mesh = dict(sums), buckets, specs, mesh
        self._last = last_uses(buckets)
        self._each = P(mesh.axis_names)  # a row, or a number, for every device
        first = buckets[0].names
        given, specs_in = [sums[name] for name in first], [unreduced_spec(specs[name], mesh) for name in first]
        outs = ([self._each, self._each], P())
        (self._row, self._squares), _ = run(("reduce", 0), self._first, (specs_in,), outs, (), given)

    def given(self, number: int) -> tuple[Arrays, list[P]]:  # noqa: D102
        names = self._following(number)
        sums, specs = [self._sums[name] for name in names], [unreduced_spec(self._specs[n], self._mesh) for n in names]
        return [self._row, self._squares, *sums], [self._each, self._each, *specs]

    def inside(self, number: int, given: Arrays, dims: Sequence[int]) -> tuple[Arrays, Arrays]:
        """As `Gradients.inside`; collectives: all-reduces of the next bucket's row, as in `reduce_gradients`."""
        reduced, squares, *sums = given
        grads = [cut_row(reduced, span, n) for span, n in zip(self._buckets[number].spans, dims, strict=True)]
        if not sums:
            return grads, [squares]
        following, more = self._reduced(number + 1, sums)
        return grads, [following, squares + more]

    def results(self, number: int) -> list[P]:  # noqa: D102
        return [self._each] * (2 if self._following(number) else 1)

    def ran(self, number: int, results: Arrays) -> None:  # noqa: D102
        *following, self._squares = results
        self._row = following[0] if following else None
        for name in self._following(number):
            if self._last[name] == number + 1:
                del self._sums[name]

    def norm(self) -> jax.Array:
        """The global norm, once all updates have been started; an all-reduce of a number over all devices."""
        return _root(self._squares)

    def _following(self, number: int) -> list[str]:
        return self._buckets[number + 1].names if number + 1 < len(self._buckets) else []

    def _first(self, sums: Arrays) -> tuple[Arrays, Arrays]:
        return list(self._reduced(0, sums)), []

    def _reduced(self, number: int, sums: Arrays) -> tuple[jax.Array, jax.Array]:
        """A bucket's reduced row, and the sum of its squares over what a device has of it, each counted once."""
        bucket = self._buckets[number]
        pieces = {s.name: cut(g[0], s).reshape(-1) for s, g in zip(bucket.spans, sums, strict=True)}
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in bucket.names:
            groups.setdefault(reduced_axes(self._specs[name]), []).append(name)
        for axes, names in groups.items():
            flat, start = reduce_sum(jnp.concatenate([pieces[name] for name in names]), axes), 0
            for name in names:
                size = pieces[name].size
                pieces[name] = flat[start : start + size]
                start += size
        squares = jnp.zeros((), jnp.float32)
        for name, piece in pieces.items():
            copies = prod(size for axis, size in self._mesh.shape.items() if axis not in spec_axes(self._specs[name]))
            squares += jnp.sum(jnp.square(piece.astype(jnp.float32))) / copies
        return row(bucket, pieces), squares[None]


@jax.jit
def _root(squares: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(squares))


def unreduced_spec(spec: P, mesh: Mesh) -> P:
    """The layout of a parameter's unreduced sums [devices that add up, ...]: one for every device of `data` and `z`."""
    over = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1 and axis not in spec_axes(spec))
    return P(over or None, *spec)


def unreduced_shardings(specs: Specs, mesh: Mesh) -> dict[str, NamedSharding]:
    """Layouts of all parameters' unreduced sums."""
    return {name: NamedSharding(mesh, unreduced_spec(spec, mesh)) for name, spec in specs.items()}
