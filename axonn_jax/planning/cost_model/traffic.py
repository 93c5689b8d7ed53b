"""The collectives of a step as times: the exact accounting's entries, priced on a machine, as lines in the batch."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from axonn_jax.core.experts.declare import TOKENS
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.planning.communication import Predicted, StepSpec, predict_microbatch, predict_update
from axonn_jax.planning.machines.machine import Curve, between, slope
from axonn_jax.planning.machines.network import CollectiveKind, GroupLinks, copies
from axonn_jax.planning.request import Candidate, PlanRequest

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
    """Slowest axis that they run over."""
    near: bool
    """True if all groups stay inside a node."""
    fixed: float
    """Seconds that do not depend on the batch."""
    per_sequence: float
    """Seconds for each sequence."""
    curves: tuple[tuple[float, Curve, float], ...] = ()
    """Measured curves: number of collectives, seconds by bytes, and bytes for each sequence."""

    def at(self, sequences: int) -> float:
        """Return the seconds for a microbatch of `sequences` per device."""
        measured = sum(count * between(curve, moved * sequences) for count, curve, moved in self.curves)
        return self.fixed + self.per_sequence * sequences + measured

    def plus(self, other: "Line") -> "Line":
        """Return the sum of two lines over the same axis."""
        return self._replace(
            fixed=self.fixed + other.fixed,
            per_sequence=self.per_sequence + other.per_sequence,
            curves=self.curves + other.curves,
        )


Lines = dict[tuple[Part, Role], tuple[Line, ...]]


class Traffic:
    """Collectives of a model's stages on a machine; all blocks are counted as one block.

    Grids that differ only in `pipe` and `data`, and whose groups are spread over nodes in the same way, have the same
    communication per microbatch, so it is priced once for all of them.
    """

    def __init__(self, request: PlanRequest, comm: BlockComm = ALL_REDUCE):
        self._request, self._comm = request, comm
        self._shape, self._machine = request.shape, request.machine
        self._inside: dict[tuple[int, GridShape], Lines] = {}
        self._updates: dict[tuple[int, int, GridShape], tuple[tuple[Part, Line], ...]] = {}

    def lines(self, grid: GridShape, part: Part, role: Role) -> tuple[Line, ...]:
        """Return the lines of a part and a role in a microbatch; none if every axis they run over has size one.

        Raises:
            UserError: The model does not divide over the grid.
        """
        mesh = grid.inside
        key = (copies(grid, self._machine.node.devices, mesh.devices), mesh)
        if key not in self._inside:
            self._shape.check_grid(mesh, sequence_split=self._comm.sequence_split)
            self._inside[key] = self._lines_of(replace(mesh, pipe=key[0]), predict_microbatch(self._work(mesh)))
        return self._inside[key].get((part, role), ())

    def updates(self, grid: GridShape) -> tuple[tuple[Part, Line], ...]:
        """Return the reductions once a step, by part of the model."""
        key = (copies(grid, self._machine.node.devices, grid.stage_devices), grid.data, grid.inside)
        if key not in self._updates:
            mesh = replace(grid, pipe=1)
            lines = self._lines_of(replace(mesh, pipe=key[0]), predict_update(self._work(mesh)))
            parts: tuple[Part, ...] = ("block", "first", "last", "step")
            self._updates[key] = tuple((part, line) for part in parts for line in lines.get((part, "update"), ()))
        return self._updates[key]

    def _work(self, mesh: GridShape) -> StepSpec:
        """Return the step of a microbatch with one sequence per device."""
        return self._request.step(Candidate(mesh, activations="full"), mesh.batch_shards, self._comm)

    def _lines_of(self, grid: GridShape, collectives: Iterable[Predicted]) -> Lines:
        """Return the sums of these collectives by part and role; `grid.pipe` copies of the mesh lie in the nodes."""
        links = GroupLinks(grid, self._machine)
        sums: dict[tuple[Part, Role], dict[tuple[str, bool], Line]] = {}
        costs: dict[tuple[CollectiveKind, tuple[str, ...]], tuple[float, bool, Curve, float]] = {}
        buckets: dict[tuple[str, ...], Line] = {}
        for collective in collectives:
            if collective.group == 1:
                continue
            cost_key = (collective.kind, collective.axes)
            if cost_key not in costs:
                costs[cost_key] = (
                    links.rate(collective.axes),
                    links.near(collective.axes),
                    links.curve(*cost_key),
                    links.latency(*cost_key),
                )
            rate, near, curve, hops = costs[cost_key]
            part, role = _part(collective), _role(collective)
            count = collective.times / (self._shape.layers if part == "block" else 1)
            # Activations grow with the sequences of a microbatch; weights and their gradients do not.
            grows = collective.phase != "update" and (collective.kind == "all-reduce" or _of_stream(collective))
            link = (collective.axes[0], near)
            if not curve:
                latency = hops * count
                ring = (2 if collective.kind == "all-reduce" else 1) * (collective.group - 1) / collective.group
                seconds = count * ring * collective.buffer_bytes / rate
                line = Line(*link, latency, seconds) if grows else Line(*link, latency + seconds, 0.0)
            elif grows:
                line = Line(*link, 0.0, 0.0, ((count, curve, collective.buffer_bytes),))
            elif role == "update" and part != "step":
                # Gradients travel in buckets: each adds its bytes at the curve's slope, and the latency counts once.
                line = Line(*link, count * slope(curve) * collective.buffer_bytes, 0.0)
                buckets[collective.axes] = Line(*link, max(0.0, curve[-1][1] - slope(curve) * curve[-1][0]), 0.0)
            else:
                line = Line(*link, count * between(curve, collective.buffer_bytes), 0.0)
            _add(sums.setdefault((part, role), {}), line)
        for line in buckets.values():
            _add(sums.setdefault(("step", "update"), {}), line)
        return {key: tuple(by_link.values()) for key, by_link in sums.items()}


def _of_stream(collective: Predicted) -> bool:
    """Return True for a gather, scatter or exchange of the residual stream or tokens, not of weights."""
    return collective.kind != "all-reduce" and collective.axes in (("expert",), ("y",), ("x",))


def _role(collective: Predicted) -> Role:
    """Return the role of a collective: of the update, of weights, or of outputs and tokens."""
    if collective.phase == "update":
        return "update"
    reread = (
        collective.phase == "recompute"
        and collective.kind == "all-gather"
        and collective.axes == ("y",)
        and collective.name != TOKENS
    )
    weights: tuple[Role, Role, Role] = ("gather", "regather", "scatter")
    outputs: tuple[Role, Role, Role] = ("reduce", "reread" if reread else "rereduce", "input")
    roles = outputs if collective.kind == "all-reduce" or _of_stream(collective) else weights
    return roles[("forward", "recompute", "backward").index(collective.phase)]


def _add(lines: dict[tuple[str, bool], Line], line: Line) -> None:
    key = (line.axis, line.near)
    lines[key] = lines[key].plus(line) if key in lines else line


def _part(collective: Predicted) -> Part:
    layer = collective.name.partition(".")[0]
    if layer == "blocks":
        return "block"
    if layer in ("embedding", "positions"):
        return "first"
    return "step" if collective.name in ("targets", "mean loss", "global norm") else "last"
