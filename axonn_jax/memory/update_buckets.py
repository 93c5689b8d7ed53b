"""What a streamed update takes at a time: parameters that are updated alike, or some rows of a large one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.clip import split_dim
from axonn_jax.tensor.collectives import axis_index

_MOST = 16
"""Parameters updated by one program: more of them only take longer to compile."""


@dataclass(frozen=True)
class Form:
    """All that the program of a parameter's update depends on; no name, so that layers share programs."""

    shape: tuple[int, ...]
    """Of its state on one device."""
    spec: P
    """The layout of its weights."""
    state_spec: P
    treatment: int
    """The same for parameters whose updates are the same computation."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one form that are fetched, updated and written back together."""

    names: tuple[str, ...]
    form: Form
    part: int = 0
    """Which part this is of a parameter that is cut."""
    dim: int = 0
    """What it is cut along."""
    start: int = 0
    rows: int | None = None
    """Along `dim`, on every device; None: its parameters are whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        """What it has of each parameter's state on one device."""
        shape = self.form.shape
        return shape if self.rows is None else (*shape[: self.dim], self.rows, *shape[self.dim + 1 :])

    @property
    def program(self) -> tuple[object, ...]:
        """Buckets for which this is the same are updated by the same program; where a part begins is an operand."""
        return self.form, len(self.names), self.dim, self.rows

    def take(self, state: jax.Array, start: jax.Array) -> jax.Array:
        """Its part of a local array shaped like the parameter's state."""
        return state if self.rows is None else lax.dynamic_slice_in_dim(state, start, self.rows, self.dim)


def plan_updates(forms: Mapping[str, Form], capacity: int, alone: Collection[str] = ()) -> list[Bucket]:
    """Puts parameters of the same form together, at most `capacity` elements on a device; a larger one is cut.

    Those that are to be `alone` come first, each in buckets of its own.
    """
    groups: dict[tuple[Form, str], list[str]] = {}
    for name in sorted(forms, key=lambda name: name not in alone):
        groups.setdefault((forms[name], name if name in alone else ""), []).append(name)
    buckets: list[Bucket] = []
    for (form, _), names in groups.items():
        size = max(prod(form.shape), 1)
        if size > capacity:
            dim, rows = _cut(form.shape, -(-size // capacity))
            starts = range(0, form.shape[dim], rows)
            buckets += [
                Bucket((name,), form, part, dim, start, min(rows, form.shape[dim] - start))
                for name in names
                for part, start in enumerate(starts)
            ]
            continue
        count = -(-len(names) // min(capacity // size, _MOST))
        each = -(-len(names) // count)
        buckets += [Bucket(tuple(names[at : at + each]), form) for at in range(0, len(names), each)]
    return buckets


def last_uses(buckets: Sequence[Bucket]) -> dict[str, int]:
    """The number of the last bucket that each parameter lies in."""
    return {name: number for number, bucket in enumerate(buckets) for name in bucket.names}


def own_piece(weight: jax.Array, bucket: Bucket, start: jax.Array) -> jax.Array:
    """The float32 elements of a weight's local shard that a device keeps the state of, in a bucket."""
    dim = split_dim(bucket.form.state_spec, "data")
    if dim is not None:
        size = bucket.form.shape[dim]
        weight = lax.dynamic_slice_in_dim(weight, axis_index("data") * size, size, dim)
    return bucket.take(weight, start).astype(jnp.float32)


def write_pieces(
    weights: list[jax.Array], pieces: list[jax.Array], bucket: Bucket, start: jax.Array, finite: jax.Array
) -> list[jax.Array]:
    """Writes a bucket's new values into local shards of weights where they are `finite`.

    Collectives: an all-gather over `data` of those that are split over it.
    """
    shape, at = bucket.form.shape, bucket.dim
    dim = split_dim(bucket.form.state_spec, "data")
    if dim is not None:  # a dim for the replicas goes before the one that they split
        pieces = list(lax.all_gather(jnp.stack(pieces), "data", axis=dim + 1))
        at += at >= dim
    out = []
    for weight, piece in zip(weights, pieces, strict=True):
        view = weight if dim is None else weight.reshape(*shape[:dim], -1, *shape[dim:])
        starts = [start if d == at else jnp.int32(0) for d in range(view.ndim)]
        piece = jnp.where(finite, piece, lax.dynamic_slice(view, starts, piece.shape))
        out.append(lax.dynamic_update_slice(view, piece, starts).reshape(weight.shape))
    return out


def _cut(shape: tuple[int, ...], count: int) -> tuple[int, int]:
    """The first dim that has rows for so many parts, or else the longest, and the rows of a part."""
    dim = next((dim for dim, size in enumerate(shape) if size >= count), shape.index(max(shape)))
    return dim, -(-shape[dim] // min(count, shape[dim]))
