"""How long a device computes: matmuls by local size, attention, what streams through memory, the optimizer."""

from dataclasses import dataclass
from math import ceil

from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.attention import attention_seconds
from axonn_jax.planner.communication import block_matmuls
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.memory import Precision, itemsize
from axonn_jax.tensor.attention_forms import AttentionKernel


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

    def __init__(
        self,
        shape: ModelShape,
        machine: Machine,
        precision: Precision,
        kernel: AttentionKernel,
        sequence_parallel: bool = False,
        inner: Inner = PAPERS,
    ):
        self.shape, self.machine, self.seq = shape, machine, shape.seq_len
        self.precision, self.kernel = precision, kernel
        self.sequence_parallel, self.inner = sequence_parallel, inner
        self.item = itemsize(precision)
        self.rate = machine.peak(precision) * machine.matmul.large * machine.matmul.sustained
        self._blocks: dict[tuple[int, int, int], Seconds] = {}
        self._heads: dict[tuple[int, int, int], Seconds] = {}

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

    def block(self, x: int, y: int, sequences: int) -> Seconds:
        """A block for a microbatch of so many sequences a device."""
        key = (x, y, sequences)
        if key not in self._blocks:
            self._blocks[key] = self._block(x, y, sequences)
        return self._blocks[key]

    def _block(self, x: int, y: int, sequences: int) -> Seconds:
        rows = sequences * self.seq
        forward = inputs = weights = 0.0
        for layer in block_matmuls(self.shape, self.inner):
            inside, outside = (x, y) if layer.in_axis == "x" else (y, x)
            if layer.spread:
                inside, outside = (1, x * y) if layer.in_axis == "x" else (x * y, 1)
            wide_in, wide_out = layer.features_in / inside, layer.features_out / outside
            forward += self.matmul(rows, wide_in, wide_out)
            inputs += self.matmul(rows, wide_out, wide_in)
            weights += self.matmul(wide_in, rows, wide_out)
        heads = sequences * self.shape.heads / (y * x if self.inner.attention else y)
        attention, attention_back = attention_seconds(
            self.kernel, self.machine, self.precision, self.rate, self.shape, heads
        )
        light = self.light(rows * self._streamed(x, y))
        return Seconds(forward + attention + light, inputs + attention_back + 2 * light, weights, attention + light)

    def _streamed(self, x: int, y: int) -> float:
        """Bytes a token moves through memory in a block's forward pass outside of matmuls and attention.

        Two norms and two additions to the residual stream (each reads and writes it), and the activation function of
        the MLP; the backward pass moves twice as much. With sequence parallelism a device has its part of the stream.
        """
        stream, gates = self.shape.hidden / x, 2 if self.shape.mlp == "swiglu" else 1
        stream /= y if self.sequence_parallel else 1
        ffn = self.shape.ffn / (y * x if self.inner.mlp else y)
        return self.item * (2 * 2 * stream + 2 * 3 * stream + (gates + 1) * ffn)

    def head(self, x: int, columns: int, sequences: int) -> Seconds:
        """The final norm, the projection onto a device's columns of the padded vocabulary, and the loss."""
        key = (x, columns, sequences)
        if key not in self._heads:
            rows, hidden = sequences * self.seq, self.shape.hidden / x
            logits = self.light(rows * columns * 4)
            self._heads[key] = Seconds(
                self.matmul(rows, hidden, columns) + 3 * logits,  # written, read for the maximum and for the sum
                self.matmul(rows, columns, hidden) + 2 * logits,  # read and overwritten by their gradient
                self.matmul(hidden, rows, columns),
                3 * logits,
            )
        return self._heads[key]

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
