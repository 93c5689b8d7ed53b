"""Tensor maps: a parameter of this package and the Hugging Face tensors that hold the same numbers; numpy only."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from axonn_jax.core.errors import UserError

# A map only moves entries: it transposes, and regroups the columns of queries, keys and values. So it applies to values
# and gradients alike. A slice of a parameter is assembled from the matching slices of tensors, so that a process never
# needs more in memory than the shards it owns.

Array = np.ndarray
"""Array of any dtype, which maps preserve."""
Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each dim."""
ReadPart = Callable[[str, Bounds], Array]
"""Function that returns the slice of a named tensor within bounds."""

_CHUNK = 32 << 20


@dataclass(frozen=True)
class TensorMap:
    """One of our parameters and the Hugging Face tensors that hold the same numbers.

    Args:
        ours: Name of our parameter.
        size: Shape of our parameter.
        theirs: Shapes of their tensors by name; several tensors hold our columns side by side.
        transposed: True if their tensors are [out, in].
        heads: KV heads, queries per KV head and features per head, if the columns are queries, keys and values; our
            columns are grouped by KV head.
    """

    ours: str
    size: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    transposed: bool = False
    heads: tuple[int, int, int] | None = None

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[np.generic]) -> Array:
        """Return the slice of our parameter within `bounds` in `dtype`; zero beyond its size (padded vocabulary)."""
        *rows, (start, stop) = [(min(a, size), min(b, size)) for (a, b), size in zip(bounds, self.size, strict=True)]
        shape = tuple(b - a for a, b in bounds)
        runs = list(self._runs(start, stop))
        exact = (stop - start, *(b - a for a, b in rows)) == (shape[-1], *shape[:-1])
        # A single run needs no output buffer: pass on a view of the tensor if dtype and layout allow it.
        if len(runs) == 1 and exact:
            ((name, first, last),) = runs
            return np.ascontiguousarray(self._part(name, (*rows, (first, last)), part).astype(dtype, copy=False))
        out, at = (np.empty if exact else np.zeros)(shape, dtype), 0
        inside = tuple(slice(b - a) for a, b in rows)
        for name, first, last in runs:
            out[(*inside, slice(at, at + last - first))] = self._part(name, (*rows, (first, last)), part)
            at += last - first
        return out

    def _part(self, name: str, bounds: Bounds, part: ReadPart) -> Array:
        return part(name, bounds[::-1]).T if self.transposed else part(name, bounds)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        # Our columns from `start` to `stop` as runs of their columns: tensor, start, stop.
        names = list(self.theirs)
        if self.heads is None:
            yield names[0], start, stop
            return
        kv_heads, group, head_dim = self.heads
        widths = (group * head_dim, head_dim, head_dim)
        begins = (0, widths[0], widths[0] + head_dim)  # start of each kind within our group of a KV head
        fused = (0, kv_heads * widths[0], kv_heads * begins[2])  # start of each kind in their fused tensor
        while start < stop:
            head, within = divmod(start, sum(widths))
            kind = sum(within >= begin for begin in begins) - 1
            count = min(stop - start, begins[kind] + widths[kind] - within)
            first = head * widths[kind] + within - begins[kind] + (fused[kind] if len(names) == 1 else 0)
            yield names[kind if len(names) > 1 else 0], first, first + count
            start += count

    def split(self, array: Array) -> list[Array]:
        """Return their tensors for our full parameter."""

        def part(bounds: Bounds) -> Array:
            return array[tuple(slice(*ends) for ends in bounds)]

        return [np.concatenate(list(self.chunks(at, part, array.itemsize))) for at in range(len(self.theirs))]

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:
        """Yield one of their tensors in pieces along its first dim, made from slices `part` of our parameter."""
        full: Bounds = tuple((0, size) for size in self.size)
        nbytes = math.prod(self.size) * itemsize
        if self.heads is None or (len(self.theirs) == 1 and len(self.size) == 2):
            along = len(self.size) - 1 if self.transposed else 0
            for ends in _ranges(self.size[along], nbytes):
                piece = part((*full[:along], ends, *full[along + 1 :]))
                if self.heads is not None:
                    piece = np.concatenate([kind.reshape(len(piece), -1) for kind in self._kinds(piece)], -1)
                yield np.ascontiguousarray(piece.T if self.transposed else piece)
            return
        # Split between KV heads, so that a piece contains all queries, keys and values of its heads.
        group = self.size[-1] // self.heads[0]
        for first, last in _ranges(self.heads[0], nbytes):
            kinds = self._kinds(part((*full[:-1], (first * group, last * group))))
            selected = kinds if len(self.theirs) == 1 else [kinds[number]]
            piece = np.concatenate([kind.reshape(*kind.shape[:-3], -1) for kind in selected], -1)
            yield np.ascontiguousarray(piece.T if self.transposed else piece)

    def _kinds(self, array: Array) -> list[Array]:
        # Queries, keys and values of complete KV heads: [..., KV heads, heads per KV head, features] each.
        assert self.heads is not None
        _, group, head_dim = self.heads
        by_head = array.reshape(*array.shape[:-1], -1, group + 2, head_dim)
        return np.split(by_head, (group, group + 1), -2)


def _ranges(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, count * _CHUNK // max(nbytes, 1))
    return ((at, min(at + step, count)) for at in range(0, count, step))


@dataclass(frozen=True)
class ExpertMap:
    """One of our parameters of all experts, [experts, in, out], and their tensors, one per expert, [out, in].

    If `theirs` is empty, their model lacks the parameter (the bias of a router), and ours is zero.
    """

    ours: str
    size: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[np.generic]) -> Array:
        """Return the slice of our parameter within `bounds` in `dtype`; reads only tensors of experts inside them."""
        out = np.zeros(tuple(stop - start for start, stop in bounds), dtype)
        if self.theirs:
            names, inner = list(self.theirs)[slice(*bounds[0])], bounds[:0:-1]
            for at, name in enumerate(names):
                out[at] = part(name, inner).T
        return out

    def split(self, array: Array) -> list[Array]:
        """Return their tensors for our full parameter; raises ``UserError`` if they lack one that is not zero."""
        if not self.theirs and np.any(array):
            raise self.not_zero()
        return [np.ascontiguousarray(array[at].T) for at in range(len(self.theirs))]

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:
        """Yield one of their tensors in pieces along its first dim, made from slices `part` of our parameter."""
        _, rows, columns = self.size
        for ends in _ranges(columns, rows * columns * itemsize):
            yield np.ascontiguousarray(part(((number, number + 1), (0, rows), ends))[0].T)

    def not_zero(self) -> UserError:
        """Return the error for a nonzero parameter that their model lacks."""
        return UserError(f"parameter {self.ours}", "not 0", "zeros: this family of transformers has no such parameter")


EntryMap = TensorMap | ExpertMap
"""Map of either kind."""
