"""Times of a device: matmuls by local size, attention, streaming; of a model's parts, with exposed communication."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from math import ceil
from typing import NamedTuple

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.ops.costs import operations
from axonn_jax.core.ops.language import FLOAT32, Attend, Collective, Multiply
from axonn_jax.core.ops.layers import Place
from axonn_jax.core.options import Activations, AttentionKernel, ReshardAfter
from axonn_jax.core.tensor.kernel_choice import tiles
from axonn_jax.planning.cost_model.traffic import Line, Part, Traffic
from axonn_jax.planning.declared.adapters import describe_trained
from axonn_jax.planning.machines.machine import Machine, matmul_share
from axonn_jax.planning.memory import itemsize
from axonn_jax.planning.request import PlanRequest, select_attention_form

_FUSED: tuple[AttentionKernel, ...] = ("cudnn", "splash")


def usual_kernel(machine: Machine) -> AttentionKernel:
    """Return the kernel that `device.attention` is the rate of: the choice for common heads in half precision."""
    return select_attention_form(machine.device, machine.half, 64, 128).kernel


class Seconds(NamedTuple):
    """Times of one microbatch on a device, in seconds."""

    forward: float
    """The forward pass."""
    inputs: float
    """Gradients of inputs."""
    weights: float
    """Gradients of weights."""
    light: float
    """Seconds of the forward pass except matmuls with weights: the part that `dots` recomputes."""


class Compute:
    """Times of one model's parts on one machine, each worked out once."""

    def __init__(self, request: PlanRequest, comm: BlockComm = ALL_REDUCE):
        self.request, self.comm = request, comm
        self.shape, self.machine, self.seq = request.shape, request.machine, request.shape.seq_len
        self.kernel, precision = request.attention_form.kernel, request.precision
        self.item = itemsize(precision)
        self.rate = self.machine.peak(precision) * self.machine.matmul.large * self.machine.matmul.sustained
        self.block, self.head = cache(self._block), cache(self._head)

    def matmul(self, rows: float, inner: float, columns: float) -> float:
        """Return the seconds of `[rows, inner] @ [inner, columns]` on a device.

        The rate is the machine's for large matmuls, reduced by the idle part of the last wave of output tiles. The time
        is at least that of moving the operands through memory, plus a launch.
        """
        tiling, flops = self.machine.matmul, 2.0 * rows * inner * columns
        seconds = flops / self.rate / matmul_share(self.machine.matmuls, (rows * inner * columns) ** (1 / 3))
        if tiling.cores:
            tiles = ceil(rows / tiling.tile_rows) * ceil(columns / tiling.tile_columns)
            padded = ceil(tiles / tiling.cores) * tiling.cores * tiling.tile_rows * tiling.tile_columns
            # Waves overlap at their ends and large matmuls are split over `inner`, so at most one full wave is wasted.
            seconds *= min(padded / (rows * columns), 1.0 + tiling.cores / tiles)
        moved = self.item * (rows * inner + inner * columns + rows * columns)
        return max(seconds, self.stream(moved)) + self.machine.device.launch_s

    def stream(self, moved: float) -> float:
        """Return the seconds of reading and writing `moved` bytes of device memory."""
        return moved / self.machine.device.memory_bytes_per_s

    def light(self, moved: float) -> float:
        """Return the seconds of norms, activation functions, additions and the loss, which move `moved` bytes."""
        return moved / (self.machine.device.light_bytes_per_s or self.machine.device.memory_bytes_per_s)

    def _block(self, expert: int, x: int, y: int, sequences: int) -> Seconds:
        """Return the times of the mean block for a microbatch of so many sequences a device."""
        at = Place(expert, 1, y, x, self.seq, self.item, self.comm.sequence_split)
        mean = Seconds(0.0, 0.0, 0.0, 0.0)
        settings = (self.request.lora, at, self.comm, self.request.moe)
        for layer in describe_trained(self.shape, *settings, scanned=True)[1:-1]:
            forward = inputs = weights = heads = moved = 0.0
            for op in operations(layer):
                if isinstance(op, Multiply):
                    rows = sequences * op.tokens
                    once = op.number * self.matmul(rows, op.inner, op.columns)
                    forward += once
                    inputs += op.number * self.matmul(rows, op.columns, op.inner) + (
                        once if op.always_recomputed else 0.0
                    )
                    weights += op.number * self.matmul(op.inner, rows, op.columns) if op.trained else 0.0
                elif isinstance(op, Attend):
                    heads += op.heads
                elif not isinstance(op, Collective):
                    moved += op.moved
            (attend, attend_back), light = self.attention(sequences * heads), self.light(sequences * self.seq * moved)
            times = (forward + attend + light, inputs + attend_back + 2 * light, weights, attend + light)
            mean = Seconds(*(a + layer.count / self.shape.layers * b for a, b in zip(mean, times, strict=True)))
        return mean

    def attention(self, heads: float) -> tuple[float, float]:
        """Return the forward and backward seconds of attention for `heads` heads, counted over all sequences.

        If the machine has a measured or estimated rate for the kernel, only the causal half counts, and the backward
        pass, which recomputes the scores, takes 2.5 times as long. Otherwise blocks are matmuls, two forward and five
        backward, and passes over their scores in memory. Forward, scores are written, then read for the maximum, the
        sum and the weights, and the weights are written and read. Backward, scores and their gradients are written and
        read, then written in the model's dtype and read five times in all. A fused kernel without a rate is assumed to
        be as slow. The unblocked kernel has two matmuls forward and four backward, with six and eight passes.
        """
        seq, machine, item, rate = self.seq, self.machine, self.item, self.rate
        device, flops = machine.device, 4.0 * self.shape.head_dim * heads
        if self.kernel == "xla":
            scores = heads * seq**2
            passes = scores * item / device.memory_bytes_per_s
            return flops * seq**2 / rate + 6 * passes, 2 * flops * seq**2 / rate + 8 * passes
        if device.attention > 0 and (self.kernel in _FUSED or usual_kernel(machine) == self.kernel):
            forward = flops * seq**2 / 2 / (rate * device.attention) + device.launch_s
            return forward, 2.5 * forward
        pairs = float(tiles(device.platform, seq).computed(seq))
        forward = flops * pairs / rate + heads * pairs * (16 + 2 * item) / device.memory_bytes_per_s
        return forward, 2.5 * flops * pairs / rate + heads * pairs * (16 + 5 * item) / device.memory_bytes_per_s

    def _head(self, x: int, columns: int, sequences: int) -> Seconds:
        """Return the times of the projection onto a device's columns of the padded vocabulary, and of the loss.

        The cache key is the number of columns, not the grid, because many grids share it.
        """
        rows, hidden = sequences * self.seq, self.shape.hidden / x
        logits = self.light(rows * columns * FLOAT32)
        # Forward, logits are written, then read for the maximum and for the sum. Backward, they are read and then
        # overwritten by their gradient.
        return Seconds(
            self.matmul(rows, hidden, columns) + 3 * logits,
            self.matmul(rows, columns, hidden) + 2 * logits,
            0.0 if self.request.lora.adapts else self.matmul(hidden, rows, columns),
            3 * logits,
        )

    def update(
        self, params: float, optimizer_params: float, gradient_item: int, travelling: float, moment: float
    ) -> float:
        """Return the seconds of the optimizer's step over the parameters that a device holds.

        Gradients are read, master weights and the optimizer's state (`moment` bytes per parameter) are read and
        written, and weights are written. The share `travelling` of masters and state comes from the host and goes back,
        in both directions at the same time.
        """
        states = 2 * (FLOAT32 + moment) * optimizer_params
        device = self.machine.device
        rate = device.update_bytes_per_s or device.memory_bytes_per_s
        on_device = (params * (gradient_item + self.item) + states) / rate
        # Transfers overlap with the update on the device, so only the slower of the two counts.
        return max(on_device, travelling * states / 2 / self.machine.host.bytes_per_s)


@dataclass
class Times:
    """Seconds of one microbatch in one part of a stage; tasks include their exposed communication."""

    forward: float = 0.0
    inputs: float = 0.0
    """Gradients of inputs, including recomputation."""
    weights: float = 0.0
    compute: float = 0.0
    """Seconds of all three tasks, without communication."""
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds by axis that communication adds to the tasks."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Seconds by axis of communication that compute hides."""

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
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
        """Return the times of a part for a microbatch of `sequences` per device.

        With `gathers` the forward pass of every microbatch gathers its weights; without, they are gathered once a step,
        which these times leave out. `lifetime` is that of gathered weights: after "forward" they are gathered again in
        the backward pass; for "step" these times leave out the scatters too.
        """
        if part != "block":
            activations = "none"  # only blocks are recomputed
        seconds = self._compute(part, sequences)
        recompute = 0.0
        if activations in ("full", "offload"):
            recompute = seconds.forward
        elif activations in ("dots", "save_collectives"):
            recompute = seconds.light
        back = recompute + seconds.inputs + seconds.weights
        # A block's input goes to the host and comes back while everything else runs, so only an excess is exposed.
        if activations == "offload":
            moved = self.compute.item * sequences * self.compute.seq * self.compute.shape.hidden / self.grid.x
            copied = moved / self.request.machine.host.bytes_per_s
            recompute += max(0.0, copied - back)
            seconds = Seconds(max(seconds.forward, copied), seconds.inputs, seconds.weights, seconds.light)
        on, times = self.request.switches, Times(compute=seconds.forward + recompute + seconds.inputs + seconds.weights)
        window = partial(_Window, speed=1.0 - self.request.machine.device.contention, times=times, sequences=sequences)
        lines = partial(self.traffic.lines, self.grid, part)
        # With two sub-batches the collectives of one overlap with the matmuls of the other, half of the compute.
        half = seconds.forward / 2 if sequences % 2 == 0 else 0.0
        forward = window(seconds.forward)
        forward.add(lines("gather") if gathers else (), seconds.forward if on.gathers else 0.0)
        forward.add(lines("reduce"), half if on.forward else 0.0)
        backward = window(back)
        backward.add(lines("input"), seconds.weights if on.gradients else 0.0)
        recomputed = window(recompute)
        if lifetime == "forward":
            backward.add(lines("regather"), back if on.gathers else 0.0)
        if activations in ("full", "dots", "offload"):
            recomputed.add(lines("rereduce"), half if on.forward else 0.0)
        # Under `none` only weight gradients read the regathered stream, so input gradients can hide it.
        if activations == "none":
            backward.add(lines("reread"), seconds.inputs if on.gradients else 0.0)
        else:
            recomputed.add(lines("reread"), half if on.forward else 0.0)
        late = window(backward.remaining)
        late.add(lines("scatter") if lifetime != "step" else (), back if on.scatters else 0.0)
        times.forward = seconds.forward + forward.exposed
        times.inputs = recompute + seconds.inputs + backward.exposed + recomputed.exposed
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
    """Stretch of compute that collectives overlap with; links inside and between nodes each serve one at a time.

    Compute keeps `speed` of its rate during a collective; the loss counts as exposed communication.
    """

    def __init__(self, compute: float | dict[bool, float], speed: float, times: Times, sequences: int):
        self.remaining = dict(compute) if isinstance(compute, dict) else {True: compute, False: compute}
        self.speed, self.times, self.sequences, self.exposed = speed, times, sequences, 0.0

    def add(self, lines: Iterable[Line], most: float) -> None:
        """Add collectives of which at most `most` seconds can be hidden here."""
        for line in lines:
            seconds = line.at(self.sequences)
            hidden = max(0.0, min(self.speed * seconds, most, self.remaining[line.near]))
            self.remaining[line.near] -= hidden
            most -= hidden
            self.exposed += seconds - hidden
            self.times.exposed[line.axis] = self.times.exposed.get(line.axis, 0.0) + seconds - hidden
            self.times.hidden[line.axis] = self.times.hidden.get(line.axis, 0.0) + hidden
