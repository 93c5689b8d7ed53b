"""Compute times of a device: matmuls by local size, attention, what streams through memory, the optimizer."""

from dataclasses import dataclass
from functools import cache
from math import ceil

from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.options import AttentionKernel
from axonn_jax.planner.communication.dense import block_matmuls
from axonn_jax.planner.machines.machine import Machine
from axonn_jax.planner.memory import itemsize
from axonn_jax.planner.request import PlanRequest, form_taken
from axonn_jax.tensor.kernel_choice import tiles

_FUSED: tuple[AttentionKernel, ...] = ("cudnn", "splash")


def usual_kernel(machine: Machine) -> AttentionKernel:
    """The one whose rate is `device.attention`: of common heads in half precision."""
    return form_taken(machine.device, machine.half, 64, 128).kernel


@dataclass(frozen=True)
class Seconds:
    """Times of one microbatch on a device, in seconds."""

    forward: float
    """The forward pass."""
    inputs: float
    """Gradients of inputs."""
    weights: float
    """Gradients of weights."""
    light: float
    """Of the forward pass, all but matmuls with weights: what `dots` computes again."""


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
        """Seconds of `[rows, inner] @ [inner, columns]` on a device.

        The machine's rate for large matmuls, less what the last wave of output tiles leaves idle; at least the time
        its operands take through memory, and a launch.
        """
        tiling, flops = self.machine.matmul, 2.0 * rows * inner * columns
        seconds = flops / self.rate / self.machine.matmul_share((rows * inner * columns) ** (1 / 3))
        if tiling.cores:
            tiles = ceil(rows / tiling.tile_rows) * ceil(columns / tiling.tile_columns)
            padded = ceil(tiles / tiling.cores) * tiling.cores * tiling.tile_rows * tiling.tile_columns
            # A few waves overlap at their ends and large matmuls are split over `inner`: a whole one at the most.
            seconds *= min(padded / (rows * columns), 1.0 + tiling.cores / tiles)
        moved = self.item * (rows * inner + inner * columns + rows * columns)
        return max(seconds, self.stream(moved)) + self.machine.device.launch_s

    def stream(self, moved: float) -> float:
        """Seconds of reading and writing so many bytes of device memory."""
        return moved / self.machine.device.memory_bytes_per_s

    def light(self, moved: float) -> float:
        """Seconds of norms, activation functions, additions and the loss, which must move so many bytes."""
        return moved / (self.machine.device.light_bytes_per_s or self.machine.device.memory_bytes_per_s)

    def _block(self, expert: int, x: int, y: int, sequences: int) -> Seconds:
        """The mean block for a microbatch of so many sequences a device."""
        rows = sequences * self.seq
        forward, inputs, weights = (seconds / self.shape.layers for seconds in self._experts(expert, x, y, rows))
        for layer in block_matmuls(self.shape, self.comm):
            share = layer.count / self.shape.layers
            inside, outside = (x, y) if layer.in_axis == "x" else (y, x)
            if layer.spread:
                inside, outside = (1, x * y) if layer.in_axis == "x" else (x * y, 1)
            wide_in, wide_out = layer.features_in / inside, layer.features_out / outside
            forward += share * self.matmul(rows, wide_in, wide_out)
            inputs += share * self.matmul(rows, wide_out, wide_in)
            weights += share * self.matmul(wide_in, rows, wide_out)
        heads = sequences * self.shape.heads / (y * x if self.comm.attention else y)
        attention, attention_back = self.attention(heads)
        light = self.light(rows * self._streamed(expert, x, y))
        return Seconds(forward + attention + light, inputs + attention_back + 2 * light, weights, attention + light)

    def _experts(self, expert: int, x: int, y: int, rows: float) -> tuple[float, float, float]:
        """Forward, gradients of inputs and of weights of all layers' experts: each multiplies its share of the choices.

        Choices are taken to be even. The backward pass of `gather` computes each expert's widths again.
        """
        moe, layers, hidden = self.shape.moe, self.shape.routed_layers, self.shape.hidden
        if moe is None:
            return 0.0, 0.0, 0.0
        chosen = rows * moe.per_token * expert / moe.experts * self.request.moe.slack
        ffn, count = moe.ffn / (x * y), layers * moe.experts / expert
        into, out_of = self.matmul(chosen, hidden, ffn), self.matmul(chosen, ffn, hidden)
        gates = self.shape.mlp_inputs
        inputs = gates * out_of + into + (0.0 if self.request.moe.drops else gates * into)
        weights = gates * self.matmul(hidden, chosen, ffn) + self.matmul(ffn, chosen, hidden)
        router = layers * self.matmul(rows, hidden / x, moe.experts)
        return count * (gates * into + out_of) + router, count * inputs + router, count * weights + router

    def attention(self, heads: float) -> tuple[float, float]:
        """Scores, softmax and their product with values, forward and backward, of so many heads of all sequences.

        At the machine's measured or estimated rate for the kernel, if it has one: the causal half alone, and 2.5 times
        as much backward, which computes the scores again. Else blocks are matmuls, two forward and five backward, and
        passes over their scores in memory: forward they are written, read for the maximum, the sum and the weights,
        and those are written and read; backward scores and their gradients are written and read, then written in the
        model's dtype and read five times in all. A fused kernel without a rate is taken to be as slow.
        Whole scores: two matmuls and four, with six and eight passes over them.
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

    def _streamed(self, expert: int, x: int, y: int) -> float:
        """Bytes a token moves through memory in the mean block's forward pass outside of matmuls and attention.

        Two norms and two additions to the residual stream (each reads and writes it), and the activation function of
        the MLP; the backward pass moves twice as much. With sequence parallelism a device has its part of the stream.
        Choices of experts are read and added to float32 results one by one, and the results written.
        """
        stream, gates = self.shape.hidden / x, self.shape.mlp_inputs
        stream /= y if self.comm.sequence_split else 1
        ffn = self.shape.ffn / (y * x if self.comm.mlp else y) * (1 - self.shape.routed_layers / self.shape.layers)
        dense = self.item * (2 * 2 * stream + 2 * 3 * stream + (gates + 1) * ffn)
        if self.shape.moe is None:
            return dense
        moe, hidden = self.shape.moe, self.shape.hidden
        chosen = moe.per_token * (hidden * (self.item + 2 * 4) + (gates + 1) * moe.ffn / (x * y) * self.item)
        results = expert * hidden * (4 + self.item)
        return dense + self.shape.routed_layers / self.shape.layers * (chosen + results)

    def _head(self, x: int, columns: int, sequences: int) -> Seconds:
        """The final norm, the projection onto a device's columns of the padded vocabulary, and the loss."""
        rows, hidden = sequences * self.seq, self.shape.hidden / x
        logits = self.light(rows * columns * 4)
        return Seconds(
            self.matmul(rows, hidden, columns) + 3 * logits,  # written, read for the maximum and for the sum
            self.matmul(rows, columns, hidden) + 2 * logits,  # read and overwritten by their gradient
            self.matmul(hidden, rows, columns),
            3 * logits,
        )

    def update(self, params: float, optimizer_params: float, accumulate: int, offload: bool) -> float:
        """Seconds of the optimizer's step over the parameters that a device holds.

        Gradients are read, master weights and moments read and written, weights written. With offload the latter come
        from the host and go back, both ways at once.
        """
        states = 2 * 3 * 4 * optimizer_params
        device = self.machine.device
        rate = device.update_bytes_per_s or device.memory_bytes_per_s
        on_device = (params * (accumulate + self.item) + states) / rate
        if not offload:
            return on_device
        return max(on_device, states / 2 / self.machine.host.bytes_per_s)
