"""Maps of tensors: one parameter of this package beside the Hugging Face tensors that hold the same numbers.

Only numpy: a tensor is at most transposed, and the columns of queries, keys and values are regrouped. A map only
moves entries, so it holds for values and gradients alike. Any part of a parameter is made of the parts of tensors that
it consists of: nobody has to hold more than that.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.errors import UserError

Array = NDArray[Any]
"""Any dtype; it is kept."""
Bounds = tuple[tuple[int, int], ...]
"""First entry, and the one behind the last, along each dim."""
ReadPart = Callable[[str, Bounds], Array]
"""Gives a part of the tensor of a name."""

_CHUNK = 32 << 20


@dataclass(frozen=True)
class TensorMap:
    """One of our parameters and the Hugging Face tensors that hold the same numbers.

    All of theirs are [out, in] where `transposed`; several hold its columns side by side. With `heads` (KV heads,
    queries of each, features of a head) the columns are queries, keys and values, which ours groups by KV head.
    """

    ours: str
    size: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    transposed: bool = False
    heads: tuple[int, int, int] | None = None

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[Any]) -> Array:
        """A part of our parameter in `dtype`; zero beyond its size, which a padded vocabulary has."""
        *rows, (start, stop) = [(min(a, size), min(b, size)) for (a, b), size in zip(bounds, self.size, strict=True)]
        shape = tuple(b - a for a, b in bounds)
        runs = list(self._runs(start, stop))
        exact = (stop - start, *(b - a for a, b in rows)) == (shape[-1], *shape[:-1])
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
        """Our columns from `start` to `stop` as runs of theirs: the tensor, its first and its last but one column."""
        names = list(self.theirs)
        if self.heads is None:
            yield names[0], start, stop
            return
        kv_heads, group, head_dim = self.heads
        widths = (group * head_dim, head_dim, head_dim)
        begins = (0, widths[0], widths[0] + head_dim)  # of each kind in our group of a KV head
        fused = (0, kv_heads * widths[0], kv_heads * begins[2])  # of each kind in one tensor of all three
        while start < stop:
            head, within = divmod(start, sum(widths))
            kind = sum(within >= begin for begin in begins) - 1
            count = min(stop - start, begins[kind] + widths[kind] - within)
            first = head * widths[kind] + within - begins[kind] + (fused[kind] if len(names) == 1 else 0)
            yield names[kind if len(names) > 1 else 0], first, first + count
            start += count

    def split(self, array: Array) -> list[Array]:
        """Theirs, of the whole of ours."""

        def part(bounds: Bounds) -> Array:
            return array[tuple(slice(*ends) for ends in bounds)]

        return [np.concatenate(list(self.chunks(at, part, array.itemsize))) for at in range(len(self.theirs))]

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:
        """One of theirs in pieces along its first dim, made of parts of ours."""
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
        group = self.size[-1] // self.heads[0]  # columns of a KV head's queries, key and value
        for first, last in _ranges(self.heads[0], nbytes):
            kinds = self._kinds(part((*full[:-1], (first * group, last * group))))
            selected = kinds if len(self.theirs) == 1 else [kinds[number]]
            piece = np.concatenate([kind.reshape(*kind.shape[:-3], -1) for kind in selected], -1)
            yield np.ascontiguousarray(piece.T if self.transposed else piece)

    def _kinds(self, array: Array) -> list[Array]:
        """Queries, keys and values of whole KV heads: [..., KV heads, heads of each, features]."""
        assert self.heads is not None
        _, group, head_dim = self.heads
        by_head = array.reshape(*array.shape[:-1], -1, group + 2, head_dim)
        return np.split(by_head, (group, group + 1), -2)


def _ranges(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, count * _CHUNK // max(nbytes, 1))
    return ((at, min(at + step, count)) for at in range(0, count, step))


@dataclass(frozen=True)
class ExpertMap:
    """A parameter of all experts, [experts, in, out], and the tensors that hold one expert's each, [out, in].

    Without any of theirs it is a parameter that no such model has, zeros: the bias of a router.
    """

    ours: str
    size: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[Any]) -> Array:
        """A part of our parameter in `dtype`, for which only tensors of experts within the bounds are read."""
        out = np.zeros(tuple(stop - start for start, stop in bounds), dtype)
        if self.theirs:
            names, inner = list(self.theirs)[slice(*bounds[0])], bounds[:0:-1]
            for at, name in enumerate(names):
                out[at] = part(name, inner).T
        return out

    def split(self, array: Array) -> list[Array]:
        """Theirs, of the whole of ours; raises ``UserError`` for one that they lack and that is not 0."""
        if not self.theirs and np.any(array):
            raise self.not_zero()
        return [np.ascontiguousarray(array[at].T) for at in range(len(self.theirs))]

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:
        """One of theirs in pieces along its first dim, made of parts of ours."""
        _, rows, columns = self.size
        for ends in _ranges(columns, rows * columns * itemsize):
            yield np.ascontiguousarray(part(((number, number + 1), (0, rows), ends))[0].T)

    def not_zero(self) -> UserError:
        """The refusal of a parameter that their model lacks, and that is not 0."""
        return UserError(f"parameter {self.ours}", "not 0", "zeros: this family of transformers has no such parameter")


EntryMap = TensorMap | ExpertMap
"""Any of them."""
