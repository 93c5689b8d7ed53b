"""The collectives of a step as times: the exact accounting's entries, priced on a machine, as lines in the batch."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from axonn_jax.experts.declare import TOKENS
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.planner.communication import Predicted, StepSpec, predict_microbatch, predict_update
from axonn_jax.planner.machines.machine import Curve, between, slope
from axonn_jax.planner.machines.network import CollectiveKind, GroupLinks, copies
from axonn_jax.planner.request import Candidate, PlanRequest

Part = Literal["block", "first", "last", "step"]
"""Part of the model that a collective belongs to: each block, before the first, behind the last, or the whole step."""

Role = Literal["gather", "reduce", "regather", "rereduce", "reread", "input", "scatter", "update"]
"""Weights gathered, outputs reduced, both again in recomputation; dX reduced, dW scattered, or its sums over
microbatches instead; the update's.

Gathers and scatters of the stream count with the reductions beside them. A stream with a split sequence is `reread` in
the backward pass under every policy.
"""


class Line(NamedTuple):
    """Seconds of some collectives over one axis, as a function of a device's sequences in a microbatch."""

    axis: str
    """The slowest of the axes they run over."""
    near: bool
    """True if all groups stay inside a node."""
    fixed: float
    """Seconds that the batch does not change."""
    each: float
    """Seconds for each sequence."""
    curves: tuple[tuple[float, Curve, float], ...] = ()
    """Measured curves: number of collectives, seconds by bytes, and bytes for each sequence."""

    def at(self, sequences: int) -> float:
        """Seconds for a microbatch of so many sequences a device."""
        measured = sum(count * between(curve, moved * sequences) for count, curve, moved in self.curves)
        return self.fixed + self.each * sequences + measured

    def plus(self, other: "Line") -> "Line":
        """Both, over the same axis."""
        return self._replace(
            fixed=self.fixed + other.fixed, each=self.each + other.each, curves=self.curves + other.curves
        )


Lines = dict[tuple[Part, Role], tuple[Line, ...]]


class Traffic:
    """Collectives of a model's stages on a machine; all blocks are counted as one block.

    A microbatch's communication is the same on all grids that differ in `pipe` and `data` alone and lie in nodes alike,
    and priced once for them.
    """

    def __init__(self, request: PlanRequest, comm: BlockComm = ALL_REDUCE):
        self._request, self._comm = request, comm
        self._shape, self._machine = request.shape, request.machine
        self._inside: dict[tuple[int, GridShape], Lines] = {}
        self._updates: dict[tuple[int, int, GridShape], tuple[tuple[Part, Line], ...]] = {}

    def lines(self, grid: GridShape, part: Part, role: Role) -> tuple[Line, ...]:
        """The lines of a part and a role in a microbatch; none where every axis they run over has size one.

        Raises ``UserError`` where the model does not divide over the grid.
        """
        mesh = grid.inside
        key = (copies(grid, self._machine.node.devices, mesh.devices), mesh)
        if key not in self._inside:
            self._shape.check_grid(mesh, sequence_split=self._comm.sequence_split)
            self._inside[key] = self._priced(replace(mesh, pipe=key[0]), predict_microbatch(self._work(mesh)))
        return self._inside[key].get((part, role), ())

    def updates(self, grid: GridShape) -> tuple[tuple[Part, Line], ...]:
        """Return the reductions once a step, by part of the model."""
        key = (copies(grid, self._machine.node.devices, grid.stage_devices), grid.data, grid.inside)
        if key not in self._updates:
            mesh = replace(grid, pipe=1)
            lines = self._priced(replace(mesh, pipe=key[0]), predict_update(self._work(mesh)))
            parts: tuple[Part, ...] = ("block", "first", "last", "step")
            self._updates[key] = tuple((part, line) for part in parts for line in lines.get((part, "update"), ()))
        return self._updates[key]

    def _work(self, mesh: GridShape) -> StepSpec:
        """A microbatch of one sequence a device."""
        return self._request.step(Candidate(mesh, activations="full"), mesh.batch_shards, self._comm)

    def _priced(self, grid: GridShape, collectives: Iterable[Predicted]) -> Lines:
        """The lines that these collectives of a mesh add up to, `grid.pipe` times one after the other in the nodes."""
        links = GroupLinks(grid, self._machine)
        sums: dict[tuple[Part, Role], dict[tuple[str, bool], Line]] = {}
        costs: dict[tuple[CollectiveKind, tuple[str, ...]], tuple[float, bool, Curve, float]] = {}
        buckets: dict[tuple[str, ...], Line] = {}
        for one in collectives:
            if one.group == 1:
                continue
            how = (one.kind, one.axes)
            if how not in costs:
                costs[how] = (links.rate(one.axes), links.near(one.axes), links.curve(*how), links.latency(*how))
            rate, near, curve, hops = costs[how]
            part, role = _part(one), _role(one)
            count = one.times / (self._shape.layers if part == "block" else 1)
            # A microbatch of more sequences has larger activations; weights and their gradients stay as they are.
            grows = one.phase != "update" and (one.kind == "all-reduce" or _of_stream(one))
            where = (one.axes[0], near)
            if not curve:
                latency = hops * count
                ring = (2 if one.kind == "all-reduce" else 1) * (one.group - 1) / one.group
                seconds = count * ring * one.whole / rate
                line = Line(*where, latency, seconds) if grows else Line(*where, latency + seconds, 0.0)
            elif grows:
                line = Line(*where, 0.0, 0.0, ((count, curve, one.whole),))
            elif role == "update" and part != "step":  # gradients travel together, in buckets
                line = Line(*where, count * slope(curve) * one.whole, 0.0)
                buckets[one.axes] = Line(*where, max(0.0, curve[-1][1] - slope(curve) * curve[-1][0]), 0.0)
            else:
                line = Line(*where, count * between(curve, one.whole), 0.0)
            _add(sums.setdefault((part, role), {}), line)
        for line in buckets.values():
            _add(sums.setdefault(("step", "update"), {}), line)
        return {key: tuple(found.values()) for key, found in sums.items()}


def _of_stream(one: Predicted) -> bool:
    """Return True for a gather, scatter or exchange of the residual stream or tokens, not of weights."""
    return one.kind != "all-reduce" and one.axes in (("expert",), ("y",), ("x",))


def _role(one: Predicted) -> Role:
    """Return the role of a collective: of the update, of weights, or of outputs and tokens."""
    if one.phase == "update":
        return "update"
    reread = one.phase == "recompute" and one.kind == "all-gather" and one.axes == ("y",) and one.name != TOKENS
    weights: tuple[Role, Role, Role] = ("gather", "regather", "scatter")
    outputs: tuple[Role, Role, Role] = ("reduce", "reread" if reread else "rereduce", "input")
    roles = outputs if one.kind == "all-reduce" or _of_stream(one) else weights
    return roles[("forward", "recompute", "backward").index(one.phase)]


def _add(found: dict[tuple[str, bool], Line], line: Line) -> None:
    key = (line.axis, line.near)
    found[key] = found[key].plus(line) if key in found else line


def _part(one: Predicted) -> Part:
    layer = one.name.partition(".")[0]
    if layer == "blocks":
        return "block"
    if layer in ("embedding", "positions"):
        return "first"
    return "step" if one.name in ("targets", "mean loss", "global norm") else "last"
