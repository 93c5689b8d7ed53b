"""Flat buckets: the local shards of all parameters as one row of numbers, cut into equal parts (AxoNN, IPDPS 22)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The part of a parameter's local shard, read row by row, that lies in a bucket."""

    name: str
    start: int
    stop: int
    at: int
    """Where in the bucket it begins."""

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Elements that are fetched, updated and written back together."""

    spans: tuple[Span, ...]
    split: bool
    """Whether its parameters are split over `data` (ZeRO-1)."""

    @property
    def size(self) -> int:
        """Elements on each device."""
        return sum(span.size for span in self.spans)

    @property
    def names(self) -> list[str]:
        """Its parameters, each once."""
        return [span.name for span in self.spans]


def plan_flat(sizes: Mapping[str, int], capacity: int, split: bool) -> list[Bucket]:
    """Cuts parameters of so many local elements, in order, into buckets of `capacity` elements; the last has fewer."""
    buckets: list[list[Span]] = [[]]
    room = capacity
    for name, size in sizes.items():
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = capacity
            stop = min(size, start + room)
            buckets[-1].append(Span(name, start, stop, capacity - room))
            room -= stop - start
            start = stop
    return [Bucket(tuple(spans), split) for spans in buckets if spans]


def last_uses(buckets: Sequence[Bucket]) -> dict[str, int]:
    """The number of the last bucket that each parameter lies in."""
    return {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
