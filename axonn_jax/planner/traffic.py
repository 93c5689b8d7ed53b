"""The collectives of a step as times: the exact accounting's entries, priced on a machine, as lines in the batch."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from axonn_jax.grid import GridShape
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.communication import Predicted, Work, predict
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.measured import Curve, between, slope
from axonn_jax.planner.network import Links

Part = Literal["block", "first", "last", "step"]
"""Where a collective belongs: in each block, before the first, behind the last, or to the step as a whole."""

Role = Literal["gather", "reduce", "regather", "rereduce", "reread", "input", "scatter", "sums", "update"]
"""Weights gathered, outputs reduced, both again in recomputation; dX reduced, dW scattered, or its sums over
microbatches instead; the update's.

A split stream's gathers count with what is reduced beside them; it is `reread` in the backward pass.
"""

_ROLES: dict[tuple[str, str], Role] = {
    ("forward", "all-gather"): "gather",
    ("forward", "all-reduce"): "reduce",
    ("recompute", "all-gather"): "regather",
    ("recompute", "all-reduce"): "rereduce",
    ("backward", "all-reduce"): "input",
    ("backward", "reduce-scatter"): "scatter",
    ("update", "all-reduce"): "update",
}
_STREAM_ROLES: dict[tuple[str, str], Role] = {
    ("forward", "all-gather"): "reduce",
    ("forward", "reduce-scatter"): "reduce",
    ("recompute", "all-gather"): "reread",
    ("recompute", "reduce-scatter"): "rereduce",
    ("backward", "all-gather"): "input",
    ("backward", "reduce-scatter"): "input",
}


class Line(NamedTuple):
    """Seconds of some collectives over one axis, as a function of a device's sequences in a microbatch."""

    axis: str
    """The slowest of the axes they run over."""
    near: bool
    """Whether they stay inside a node."""
    fixed: float
    """Seconds that the batch does not change."""
    each: float
    """Seconds for each sequence."""
    curves: tuple[tuple[float, Curve, float], ...] = ()
    """How often, measured seconds by bytes, and bytes for each sequence."""

    def at(self, sequences: int) -> float:
        """Seconds for a microbatch of so many sequences a device."""
        measured = sum(count * between(curve, moved * sequences) for count, curve, moved in self.curves)
        return self.fixed + self.each * sequences + measured

    def plus(self, other: "Line") -> "Line":
        """Both, over the same axis."""
        return self._replace(
            fixed=self.fixed + other.fixed, each=self.each + other.each, curves=self.curves + other.curves
        )


class Traffic:
    """Every collective of one stage's mesh; blocks are counted as one block, all else as it comes."""

    def __init__(
        self,
        shape: ModelShape,
        grid: GridShape,
        machine: Machine,
        item: int,
        accumulate: int = 4,
        sequence_parallel: bool = False,
    ):
        self.links = Links(grid, machine)
        sums: dict[tuple[Part, Role], dict[tuple[str, bool], Line]] = {}
        costs: dict[tuple[str, ...], tuple[float, bool]] = {}
        buckets: dict[tuple[str, ...], Line] = {}
        work = Work(shape, grid, grid.batch_shards, 1, item, "full", sequence_parallel=sequence_parallel)
        for one in predict(work):
            if one.axes not in costs:
                costs[one.axes] = (self.links.rate(one.axes), self._near(one.axes))
            rate, near = costs[one.axes]
            part, role = _part(one), _role(one)
            count = one.times / (shape.layers if part == "block" else 1)
            # A microbatch of more sequences has larger activations; weights and their gradients stay as they are.
            grows = one.phase != "update" and (one.kind == "all-reduce" or _of_stream(one))
            where, curve = (one.axes[0], near), self.links.curve(one.kind, one.axes)
            wider = accumulate / item  # sums of gradients over gradients
            sent = Line(*where, 0.0, 0.0)  # the sums
            if not curve:
                latency = self.links.latency(one.kind, one.axes) * count
                ring = (2 if one.kind == "all-reduce" else 1) * (one.group - 1) / one.group
                seconds = count * ring * one.whole / rate
                line = Line(*where, latency, seconds) if grows else Line(*where, latency + seconds, 0.0)
                sent = Line(*where, latency + seconds * wider, 0.0)
            elif grows:
                line = Line(*where, 0.0, 0.0, ((count, curve, one.whole),))
            elif role == "update" and part != "step":  # gradients travel together, in buckets
                line = Line(*where, count * slope(curve) * one.whole, 0.0)
                buckets[one.axes] = Line(*where, max(0.0, curve[-1][1] - slope(curve) * curve[-1][0]), 0.0)
            else:
                line = Line(*where, count * between(curve, one.whole), 0.0)
                sent = Line(*where, count * between(curve, one.whole * wider), 0.0)
            _add(sums.setdefault((part, role), {}), line)
            if role == "scatter":
                _add(sums.setdefault((part, "sums"), {}), sent)
        for line in buckets.values():
            _add(sums.setdefault(("step", "update"), {}), line)
        self._lines = {key: tuple(found.values()) for key, found in sums.items()}

    def lines(self, part: Part, role: Role) -> tuple[Line, ...]:
        """The lines of a part and role; none where every axis they run over has size one."""
        return self._lines.get((part, role), ())

    def updates(self) -> Iterator[tuple[Part, Line]]:
        """What is reduced once a step, by the part it belongs to."""
        for part in ("block", "first", "last", "step"):
            for line in self.lines(part, "update"):
                yield part, line

    def _near(self, axes: tuple[str, ...]) -> bool:
        size = 1
        for axis in axes:
            size *= self.links.sizes[axis]
        return self.links.inner(axes) * size <= self.links.machine.node.devices


def _of_stream(one: Predicted) -> bool:
    """Whether it gathers or scatters the residual stream, and not weights."""
    return one.kind != "all-reduce" and one.axes == ("y",)


def _role(one: Predicted) -> Role:
    return (_STREAM_ROLES if _of_stream(one) else _ROLES)[one.phase, one.kind]


def _add(found: dict[tuple[str, bool], Line], line: Line) -> None:
    key = (line.axis, line.near)
    found[key] = found[key].plus(line) if key in found else line


def _part(one: Predicted) -> Part:
    if one.name.startswith("blocks"):
        return "block"
    if one.name in ("embedding", "positions"):
        return "first"
    return "step" if one.name in ("mean loss", "global norm") else "last"
