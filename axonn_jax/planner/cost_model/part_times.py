"""Times of a microbatch in a block or the head of a stage: compute, and the communication that is left exposed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial

from axonn_jax.grid import GridShape
from axonn_jax.options import Activations, ReshardAfter
from axonn_jax.planner.cost_model.compute import Compute, Seconds
from axonn_jax.planner.cost_model.traffic import Line, Part, Traffic
from axonn_jax.planner.request import PlanRequest


@dataclass
class Times:
    """Seconds of one microbatch in one part of a stage; tasks have the exposed communication in them."""

    forward: float = 0.0
    inputs: float = 0.0
    """Gradients of inputs, recomputation with it."""
    weights: float = 0.0
    compute: float = 0.0
    """Seconds of all three tasks, without communication."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds by axis that communication adds to the tasks."""
    hidden: dict[str, float] = field(default_factory=dict)
    """By axis, the rest of it."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.inputs + self.weights


class PartTimes:
    """Times of the parts of one grid's stages, by microbatch and activation policy, each worked out once."""

    def __init__(self, grid: GridShape, request: PlanRequest, compute: Compute, traffic: Traffic):
        self.grid, self.request, self.compute, self.traffic = grid, request, compute, traffic
        self.times = cache(self._times)

    def _times(
        self,
        part: Part,
        sequences: int,
        activations: Activations,
        gathers: bool,
        lifetime: ReshardAfter = "forward",
    ) -> Times:
        """Times of a part for a microbatch of so many sequences a device.

        `gathers` says that the forward pass of every microbatch gathers its weights; else they are gathered once a
        step, which is not in these times. `lifetime` says how long they live: after "forward" they are gathered
        again in the backward pass, for "step" scatters are not in these times either.
        """
        if part != "block":
            activations = "none"  # only blocks are computed again
        seconds = self._compute(part, sequences)
        again = 0.0
        if activations in ("full", "offload"):
            again = seconds.forward
        elif activations in ("dots", "save_collectives"):
            again = seconds.light
        back = again + seconds.inputs + seconds.weights
        if activations == "offload":  # a block's input goes to the host and comes back, beside everything else
            moved = self.compute.item * sequences * self.compute.seq * self.compute.shape.hidden / self.grid.x
            copied = moved / self.request.machine.host.bytes_per_s
            again += max(0.0, copied - back)
            seconds = Seconds(max(seconds.forward, copied), seconds.inputs, seconds.weights, seconds.light)
        on, times = self.request.switches, Times(compute=seconds.forward + again + seconds.inputs + seconds.weights)
        window = partial(_Window, speed=1.0 - self.request.machine.device.contention, times=times, sequences=sequences)
        lines = partial(self.traffic.lines, self.grid, part)
        half = seconds.forward / 2 if sequences % 2 == 0 else 0.0  # the other sub-batch's matmuls, one of two
        forward = window(seconds.forward)
        forward.add(lines("gather") if gathers else (), seconds.forward if on.gathers else 0.0)
        forward.add(lines("reduce"), half if on.forward else 0.0)
        backward = window(back)
        backward.add(lines("input"), seconds.weights if on.gradients else 0.0)
        recomputed = window(again)
        if lifetime == "forward":
            backward.add(lines("regather"), back if on.gathers else 0.0)
        if activations in ("full", "dots", "offload"):
            recomputed.add(lines("rereduce"), half if on.forward else 0.0)
        if activations == "none":  # only gradients of weights read it
            backward.add(lines("reread"), seconds.inputs if on.gradients else 0.0)
        else:
            recomputed.add(lines("reread"), half if on.forward else 0.0)
        late = window(backward.left)
        late.add(lines("scatter") if lifetime != "step" else (), back if on.scatters else 0.0)
        times.forward = seconds.forward + forward.exposed
        times.inputs = again + seconds.inputs + backward.exposed + recomputed.exposed
        times.weights = seconds.weights + late.exposed
        return times

    def _compute(self, part: Part, sequences: int) -> Seconds:
        if part == "block":
            return self.compute.block(self.grid.expert, self.grid.x, self.grid.y, sequences)
        if part == "last":
            columns = self.compute.shape.padded_vocab(self.grid.y * self.grid.z) // self.grid.y
            return self.compute.head(self.grid.x, columns, sequences)
        return Seconds(0.0, 0.0, 0.0, 0.0)


class _Window:
    """Stretch of compute that collectives run beside; links of a node, and between nodes, serve one at a time.

    Compute keeps `speed` of its rate beside a collective; the loss counts as communication that is not hidden.
    """

    def __init__(self, compute: float | dict[bool, float], speed: float, times: Times, sequences: int):
        self.left = dict(compute) if isinstance(compute, dict) else {True: compute, False: compute}
        self.speed, self.times, self.sequences, self.exposed = speed, times, sequences, 0.0

    def add(self, lines: Iterable[Line], most: float) -> None:
        """Add collectives of which at most `most` seconds can be hidden here."""
        for line in lines:
            seconds = line.at(self.sequences)
            hidden = max(0.0, min(self.speed * seconds, most, self.left[line.near]))
            self.left[line.near] -= hidden
            most -= hidden
            self.exposed += seconds - hidden
            self.times.exposed[line.axis] = self.times.exposed.get(line.axis, 0.0) + seconds - hidden
            self.times.hidden[line.axis] = self.times.hidden.get(line.axis, 0.0) + hidden
