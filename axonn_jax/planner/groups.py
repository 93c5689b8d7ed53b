"""Who takes part in a collective: replica groups as printed, and the mesh axes they run over."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product

_NUMBERS = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
"""How a printed mesh's devices lie where they are not in the order of their numbers."""

Groups = tuple[tuple[int, ...], ...]
Axes = tuple[str, ...]


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective of `devices` in all: lists, `[2,4]<=[8]T(1,0)`, a mesh's axes, or everyone.

    A permutation's groups are its pairs of source and target. Raises ``ValueError`` where none is printed.
    """
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes):
        return tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)\}", pairs[1]))
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes):
        groups = tuple(tuple(int(n) for n in one.split(",")) for one in re.findall(r"\{([\d,]+)\}", listed[1]))
        return groups or (tuple(range(devices)),)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        dims = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        return _chunks(_transposed(dims, order), int(iota[2]))
    if named := re.search(rf"replica_groups=mesh\[([^\]]+)\]{_NUMBERS} \{{([^}}]+)\}}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[4])
        names = list(sizes)
        order = [names.index(axis) for axis in (*(axis for axis in names if axis not in over), *over)]
        count = 1
        for axis in over:
            count *= sizes[axis]
        places = _transposed(list(sizes.values()), order)
        return _chunks([_numbers(named[2], named[3], len(places))[place] for place in places], count)
    raise ValueError(f"no replica groups in {attributes[:200]!r}")


def _numbers(dims: str | None, order: str | None, count: int) -> list[int]:
    """The device at every place of a printed mesh: in order, unless the mesh says how its devices lie."""
    if dims is None:
        return list(range(count))
    sizes = [int(n) for n in dims.split(",")]
    return _transposed(sizes, [int(n) for n in order.split(",")] if order else list(range(len(sizes))))


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... as an array of `dims` (last dim fastest), its dims put into `order`, flattened."""
    strides = [1] * len(dims)
    for at in reversed(range(len(dims) - 1)):
        strides[at] = strides[at + 1] * dims[at + 1]
    places = product(*(range(dims[at]) for at in order))
    return [sum(index * strides[at] for index, at in zip(place, order, strict=True)) for place in places]


def _chunks(ids: Sequence[int], size: int) -> Groups:
    return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))


def axes_finder(axes: Mapping[str, int], order: Sequence[int] | None = None) -> Callable[[Groups, bool], Axes | None]:
    """Returns a function that names the mesh axes (slowest first) that groups run over, None where none fit.

    `axes` has the mesh's sizes, slowest first. `order[place]` is the number that replica groups use for the device
    at a place of the flattened mesh; left out, they are the same, as they are in programs that jax compiles. The
    function's second argument says that the groups are pairs of a permutation: these run over every axis along
    which some pair differs; other groups must be exactly the devices that differ along the axes.
    """
    names, sizes = tuple(axes), tuple(axes.values())
    numbers = range(len(list(product(*map(range, sizes))))) if order is None else order
    places = dict(zip(numbers, product(*map(range, sizes)), strict=True))

    @cache
    def over(groups: Groups, permutation: bool) -> Axes | None:
        if not all(device in places for group in groups for device in group):
            return None
        found = set()
        for group in groups:
            members = [places[device] for device in group]
            along = tuple(at for at in range(len(names)) if len({place[at] for place in members}) > 1)
            whole = 1
            for at in along:
                whole *= sizes[at]
            if not permutation and (len(set(group)) != len(group) or whole != len(group)):
                return None
            found.add(along)
        if permutation:
            return tuple(name for at, name in enumerate(names) if any(at in along for along in found))
        return tuple(names[at] for at in found.pop()) if len(found) == 1 else None

    return over
