"""Reads the collectives out of a compiled program's HLO text."""

import re
from typing import NamedTuple

import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


class Collective(NamedTuple):
    """One collective instruction."""

    kind: str
    bytes: int
    groups: list[list[int]]
    in_loop: bool

    def crosses(self, mesh, axis: str) -> bool:
        """Whether some group holds devices that differ in their place along `axis`."""
        places = {device.id: place for place, device in np.ndenumerate(mesh.devices)}
        along = mesh.axis_names.index(axis)
        return any(len({places[device][along] for device in group}) > 1 for group in self.groups)


def collectives(text: str) -> list[Collective]:
    """Every collective of the program, with whether a loop runs it."""
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    looped: set[str] = set()
    while bodies:
        name = bodies.pop()
        if name in looped:
            continue
        looped.add(name)
        bodies |= set(re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)", computations.get(name, "")))
    found = []
    for name, body in computations.items():
        for result, kind, rest in re.findall(rf"= (.*?) ({_KINDS})(?:-start)?\((.*)", body):
            sizes = re.findall(r"(\w+)\[([\d,]*)\]", result)
            size = sum(_BYTES[t] * int(np.prod([int(n) for n in dims.split(",") if n])) for t, dims in sizes)
            found.append(Collective(kind, size, _groups(rest), name in looped))
    return found


def _groups(text: str) -> list[list[int]]:
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", text)  # a permutation: who sends to whom
    if pairs:
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", text)
    if listed:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    named = re.search(rf"replica_groups=mesh\[([^\]]+)\]{order} \{{([^}}]+)\}}", text)  # from jax 0.11 on
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        over = re.findall(r"'(\w+)'", named[4])
        ids = np.arange(np.prod(list(sizes.values())))
        if named[2]:  # the mesh's devices are not in the order of their numbers
            ids = ids.reshape([int(n) for n in named[2].split(",")])
            ids = ids.transpose([int(n) for n in named[3].split(",")]) if named[3] else ids
        ids = ids.reshape(list(sizes.values()))
        rest = [axis for axis in sizes if axis not in over]
        ids = ids.transpose([list(sizes).index(axis) for axis in (*rest, *over)])
        return ids.reshape(-1, int(np.prod([sizes[axis] for axis in over]))).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert iota, text
    shape, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
    ids = np.arange(np.prod(dims)).reshape(dims)
    if iota[3]:
        ids = ids.transpose([int(n) for n in iota[3].split(",")])
    return ids.reshape(shape).tolist()
